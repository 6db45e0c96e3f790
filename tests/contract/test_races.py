"""Many threads at once: what only one may have, one gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from celery_guard.decisions import BeginOutcome, ClaimOutcome
from celery_guard.stores.protocols import GuardStore
from tests.contract.verbs import Verbs

THREADS = 50
Result = TypeVar("Result")


def at_once(act: Callable[[int], Result]) -> list[Result]:
    """Run ``act(0)`` to ``act(49)`` in threads that start together."""
    barrier = threading.Barrier(THREADS)

    def start(number: int) -> Result:
        barrier.wait(30)
        return act(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(start, range(THREADS)))


def test_one_claim(verbs: Verbs) -> None:
    """Of 50 dispatches at once one is taken, and all others are told of that one."""
    results = at_once(lambda n: verbs.claim(f"o{n}"))
    held = verbs.held()
    others = [result for result in results if result.outcome is not ClaimOutcome.CLAIMED]
    assert len(others) == THREADS - 1
    assert {(result.outcome, result.holder_task_id) for result in others} == {(ClaimOutcome.HELD, held.task_id)}


def test_slots(verbs: Verbs) -> None:
    """Of 50 runs at once exactly ``limit`` get a slot, each under its own fence."""
    results = at_once(lambda n: verbs.begin(f"o{n}", f"t{n}", lock="L", limit=7))
    granted = [result.fence for result in results if result.outcome is BeginOutcome.RUN]
    assert len(granted) == len(set(granted)) == len(verbs.holders()) == 7


def test_copies(verbs: Verbs) -> None:
    """Of 50 deliveries of one message one runs."""
    outcomes = [result.outcome for result in at_once(lambda n: verbs.begin(token=f"t{n}", claim="r"))]
    assert (outcomes.count(BeginOutcome.RUN), outcomes.count(BeginOutcome.COPY_RUNNING)) == (1, THREADS - 1)


def test_never_two_in_a_lock_of_one(verbs: Verbs) -> None:
    """Threads that take and give back one slot in turn never meet inside, and the fence follows their order."""
    inside: list[int] = []
    fences: list[int] = []
    met: list[list[int]] = []

    def work(number: int) -> None:
        for turn in range(10):
            token = f"t{number}.{turn}"
            result = verbs.begin(f"o{number}", token, lock="L")
            if result.outcome is BeginOutcome.RUN:
                inside.append(number)
                fences.append(result.fence or 0)
                if len(inside) > 1:
                    met.append(list(inside))
                inside.remove(number)
                verbs.end(f"o{number}", token, lock="L")

    at_once(work)
    assert met == []
    assert fences
    assert fences == sorted(set(fences))


def test_end_and_release_count_once(verbs: Verbs, store: GuardStore) -> None:
    """Of 50 that give the same thing back one is told that it did."""
    verbs.claim()
    assert at_once(lambda n: store.release_claim("r", "o1")).count(True) == 1
    verbs.begin(lock="L")
    assert [result.slot_released for result in at_once(lambda n: verbs.end(lock="L"))].count(True) == 1
