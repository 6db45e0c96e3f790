"""The heartbeat without a store: who is extended when, and what a run is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from celery_guard.decisions import ExtendOutcome, ExtendRequest, ExtendResult
from celery_guard.errors import StoreUnavailable
from celery_guard.heartbeat import Heartbeat


class FakeRun:
    def __init__(self, token: str = "t", lease: float = 30.0, max_hold: float | None = None, now: float = 0.0) -> None:
        self.token, self.lease, self.max_hold = token, lease, max_hold
        self.started = self.extended = now
        self.results: list[ExtendResult] = []
        self.lost: list[str] = []
        self.wants = True

    def extend_request(self) -> ExtendRequest | None:
        return ExtendRequest("o", self.token, 0, "id", "w", self.lease) if self.wants else None

    def on_extended(self, result: ExtendResult) -> None:
        self.results.append(result)

    def on_lost(self, reason: str) -> None:
        self.lost.append(reason)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


HELD, LOST = ExtendResult(ExtendOutcome.HELD), ExtendResult(ExtendOutcome.LOST)


def store(calls: list[list[str]], answer: Callable[[ExtendRequest], ExtendResult]) -> Callable[[Sequence[ExtendRequest]], list[ExtendResult]]:
    def extend(requests: Sequence[ExtendRequest]) -> list[ExtendResult]:
        calls.append([request.token for request in requests])
        return [answer(request) for request in requests]

    return extend


def test_one_call_for_all() -> None:
    """However many locks a process holds, a beat is one call; each run gets its own answer."""
    calls: list[list[str]] = []
    clock = Clock()
    heartbeat = Heartbeat(store(calls, lambda request: LOST if request.token == "b" else HELD), monotonic=clock)
    runs = [FakeRun(token, now=clock.now) for token in "abc"]
    clock.now += 10
    heartbeat.beat(runs)
    assert calls == [["a", "b", "c"]]
    assert [run.results for run in runs] == [[HELD], [LOST], [HELD]]
    assert [run.extended for run in runs] == [110.0, 100.0, 110.0]


def test_nothing_held_no_call() -> None:
    """A run that has given up its lock is not asked for again."""
    calls: list[list[str]] = []
    heartbeat = Heartbeat(store(calls, lambda _: HELD), monotonic=Clock())
    run = FakeRun()
    run.wants = False
    heartbeat.beat([run])
    assert calls == []


def test_max_hold_ends_renewal_then_the_lease_ends_the_lock() -> None:
    """After max_hold nothing is renewed, and the run is told once its last lease is over."""
    calls: list[list[str]] = []
    clock = Clock()
    heartbeat = Heartbeat(store(calls, lambda _: HELD), monotonic=clock)
    run = FakeRun(lease=30, max_hold=60, now=clock.now)
    clock.now += 50
    heartbeat.beat([run])
    clock.now += 15
    heartbeat.beat([run])
    assert (len(calls), run.lost) == (1, [])
    clock.now += 20
    heartbeat.beat([run])
    assert (len(calls), run.lost) == (1, ["max_hold"])


def test_an_outage_shorter_than_the_lease_is_no_loss() -> None:
    """Errors are retried until the lease is really over; only then the run is told."""
    clock = Clock()
    down = True

    def extend(requests: Sequence[ExtendRequest]) -> list[ExtendResult]:
        if down:
            raise StoreUnavailable("away", operation="extend", address="x", uncertain=False)
        return [HELD for _ in requests]

    heartbeat = Heartbeat(extend, monotonic=clock)
    run = FakeRun(lease=30, now=clock.now)
    for _ in range(5):
        clock.now += 5
        heartbeat.beat([run])
    assert run.lost == []
    clock.now += 6
    heartbeat.beat([run])
    assert run.lost == ["unreachable"]
    down = False
    heartbeat.beat([run])
    assert run.results == [HELD]


def test_the_thread_extends_what_is_added_and_forgets_what_is_removed() -> None:
    """One daemon thread, started by the first run; a removed run is not extended again."""
    calls: list[list[str]] = []
    beaten = threading.Event()

    def answer(request: ExtendRequest) -> ExtendResult:
        beaten.set()
        return HELD

    heartbeat = Heartbeat(store(calls, answer))
    run = FakeRun("a", lease=0.03, now=time.monotonic())
    heartbeat.add(run)
    assert beaten.wait(10)
    heartbeat.remove(run)
    other = FakeRun("b", lease=0.03, now=time.monotonic())
    done = len(calls)
    beaten.clear()
    heartbeat.add(other)
    assert beaten.wait(10)
    assert ["b"] in calls[done:]
    assert all("a" not in tokens for tokens in calls[done + 1 :])
    heartbeat.remove(other)
    assert len(heartbeat) == 0
    assert sum(thread.name == "celery_guard-heartbeat" for thread in threading.enumerate()) >= 1


def test_a_fault_does_not_end_the_thread() -> None:
    """An unexpected error in one beat must not let every other lock of the process lapse."""
    seen: list[int] = []
    second = threading.Event()

    def extend(requests: Sequence[ExtendRequest]) -> list[ExtendResult]:
        seen.append(len(requests))
        if len(seen) == 1:
            raise RuntimeError("bug")
        second.set()
        return [HELD for _ in requests]

    heartbeat = Heartbeat(extend)
    run = FakeRun(lease=0.03, now=time.monotonic())
    heartbeat.add(run)
    assert second.wait(10)
    heartbeat.remove(run)


def test_the_end_of_a_run_waits_for_an_extension_under_way() -> None:
    """An extension that reaches the store behind the run's end would take back its lock: remove() returns when it is through."""
    under_way, go = threading.Event(), threading.Event()
    order: list[str] = []

    def extend(requests: Sequence[ExtendRequest]) -> list[ExtendResult]:
        under_way.set()
        assert go.wait(10)
        order.append("extended")
        return [HELD for _ in requests]

    heartbeat = Heartbeat(extend)
    run = FakeRun(lease=0.03, now=time.monotonic())
    heartbeat.add(run)
    assert under_way.wait(10)
    timer = threading.Timer(0.05, go.set)
    timer.start()
    heartbeat.remove(run)
    order.append("removed")
    timer.join()
    assert order == ["extended", "removed"]


def test_remove_waits_for_the_extension_under_way() -> None:
    """An extension that arrives after the end of its run would take the slot again, for a whole lease."""
    asked, go_on = threading.Event(), threading.Event()
    answered: list[float] = []

    def extend(requests: Sequence[ExtendRequest]) -> list[ExtendResult]:
        asked.set()
        go_on.wait(10)
        answered.append(time.monotonic())
        return [HELD for _ in requests]

    heartbeat = Heartbeat(extend)
    run = FakeRun(lease=0.03, now=time.monotonic())
    heartbeat.add(run)
    assert asked.wait(10)
    removed: list[float] = []

    def remove() -> None:
        heartbeat.remove(run)
        removed.append(time.monotonic())

    thread = threading.Thread(target=remove)
    thread.start()
    go_on.set()
    thread.join(10)
    assert answered
    assert removed
    assert removed[0] >= answered[0]
