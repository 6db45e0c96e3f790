"""The guards hold in every pool, and no exception of ours ends a worker."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from celery_guard import errors
from celery_guard.decisions import BeginOutcome, BeginRequest, EndRequest
from tests.services import wait_until
from tests.services.stage import Stage
from tests.services.trace import Trace, highest_overlap

TASKS = "tests.services.chaos_tasks"
LEASE = 3.0
TIMEOUT = 30.0
TOGETHER = {"solo": 1, "threads": 4, "prefork": 4}


def _pools(*names: str, smoke: str | None = None) -> list[Any]:
    """The pools as parameters, each on one xdist process: its worker is shared."""
    marks = {name: [pytest.mark.xdist_group(f"pool-{name}"), *([pytest.mark.smoke] if name == smoke else [])] for name in names}
    return [pytest.param(name, id=name, marks=marks[name]) for name in names]


ALL_POOLS = _pools("solo", "threads", "prefork")


class Scene:
    """One test's key and log, on the worker of one pool."""

    def __init__(self, stage: Stage, pool: str, directory: Path) -> None:
        self.stage = stage
        self.store = stage.store
        self.pool = pool
        self.worker = stage.workers[0]
        self.trace = Trace(directory / "trace")
        self.directory = directory
        self.key = f"{pool}-{directory.name}"

    def file(self, call: str) -> str:
        return str(self.directory / f"{call}.go")

    def let_go(self, call: str) -> None:
        Path(self.file(call)).touch()

    def call(self, call: str) -> str:
        """The call's name, and with it its claim, which no other test has."""
        return f"{self.key}-{call}"

    def dispatch(self, name: str, call: str, *more: Any) -> Any:
        return self.stage.task(f"{TASKS}.{name}").delay(self.call(call), self.key, str(self.trace), *more)

    def lock(self, name: str) -> str:
        return f"{TASKS}.{name}:{self.key}"

    def started(self, call: str) -> Any:
        wait_until(lambda: self.trace.events("start", call=self.call(call)), TIMEOUT, lambda: f"start of {call}{self.stage.logs()}")
        return self.trace.events("start", call=self.call(call))[0]

    def nothing_left(self) -> None:
        def left() -> list[Any]:
            locks = [lock for lock in self.store.list_locks() if self.key in lock.resource]
            claims = [claim for claim in self.store.list_claims() if self.key in claim.resource]
            return [*locks, *claims]

        wait_until(lambda: not left(), TIMEOUT, lambda: f"nothing held, but {left()}")


@pytest.fixture(scope="module")
def stage_of() -> Iterator[Callable[[str], Stage]]:
    """Gives each pool that is asked for one stage with one worker."""
    with ExitStack() as stack:

        @cache
        def stage_of(pool: str) -> Stage:
            stage = stack.enter_context(Stage(TASKS, broker_transport_options={"visibility_timeout": 3600}))
            stage.worker(pool=pool, concurrency=TOGETHER[pool])
            return stage

        yield stage_of


@pytest.fixture
def scene(pool: str, stage_of: Callable[[str], Stage], tmp_path: Path) -> Scene:
    return Scene(stage_of(pool), pool, tmp_path)


@pytest.mark.parametrize("pool", _pools("solo", "threads", "prefork", smoke="prefork"))
def test_unique_lock_retry_and_results(scene):
    """In every pool a duplicate gives the result of the first, runs of one key do not overlap, and a retry goes through its own claim and lock."""
    first = scene.dispatch("hold", "held", scene.file("held"))
    scene.started("held")
    duplicate = scene.dispatch("hold", "held", scene.file("held"))
    assert duplicate.duplicate is True
    assert duplicate.id == first.id
    scene.let_go("held")
    assert scene.stage.get(duplicate) == scene.call("held")

    works = [scene.dispatch("work", f"work-{number}", 0.1) for number in range(6)]
    retried = scene.dispatch("fail_first", "retried", 2)
    assert [scene.stage.get(result) for result in works] == [scene.call(f"work-{number}") for number in range(6)]
    assert scene.stage.get(retried) == 2
    assert [event.retries for event in scene.trace.events("start", call=scene.call("retried"))] == [0, 1, 2]
    spans = [span for span in scene.trace.spans() if span.call.startswith(scene.call("work-"))]
    assert len(spans) == 6
    assert highest_overlap(spans) == 1
    assert len(scene.trace.events("start", call=scene.call("held"))) == 1
    scene.nothing_left()


@pytest.mark.parametrize("pool", ALL_POOLS)
def test_postponement_spends_no_retry(scene):
    """In every pool a task whose lock is held elsewhere is postponed, runs when the lock is free, and its result arrives."""
    lock = scene.lock("work")
    other = BeginRequest(secrets.token_hex(8), secrets.token_hex(8), 0, "elsewhere", "elsewhere", lease=60, lock=lock)
    assert scene.store.begin(other).outcome is BeginOutcome.RUN
    result = scene.dispatch("work", "late", 0.0)
    scene.stage.state(result, "RETRY")
    assert not scene.trace.happened("start")
    assert scene.dispatch("work", "late", 0.0).id == result.id
    assert scene.store.end(EndRequest(other.owner, other.token, lock=lock)).slot_released
    assert scene.stage.get(result) == scene.call("late")
    assert [event.retries for event in scene.trace.events("start")] == [0]
    scene.nothing_left()


@pytest.mark.parametrize("pool", ALL_POOLS)
def test_lease_is_extended(scene):
    """In every pool the heartbeat extends the lease of a run that takes longer."""
    result = scene.dispatch("hold", "long", scene.file("long"))
    token = scene.started("long").token
    (first,) = scene.store.get_lock(scene.lock("hold")).holders

    def extended() -> bool:
        lock = scene.store.get_lock(scene.lock("hold"))
        assert lock is not None
        (holder,) = lock.holders
        assert holder.token == token
        return bool(holder.expires_at > first.expires_at + LEASE)

    wait_until(extended, TIMEOUT, "lease extended")
    scene.let_go("long")
    assert scene.stage.get(result) == scene.call("long")
    assert not scene.trace.happened("lost")
    scene.nothing_left()


@pytest.mark.parametrize("pool", ALL_POOLS)
def test_every_error_arrives_readable(scene):
    """Each of our exceptions, raised in a task, arrives as what it is and with its text; the worker lives on (R256)."""
    pids = set(scene.worker.child_pids())
    failures = {name: scene.dispatch("fail", name, "celery_guard.errors", name) for name in errors.__all__}
    for name, result in failures.items():
        scene.stage.state(result, "FAILURE", timeout=TIMEOUT)
        error = result.result
        assert type(error) is getattr(errors, name)
        assert str(error) == "on purpose"
        assert "on purpose" in result.traceback
    runs = [event.call for event in scene.trace.events("start")]
    assert sorted(runs) == sorted(scene.call(name) for name in errors.__all__)
    assert scene.stage.get(scene.stage.task(f"{TASKS}.plain").delay(scene.key, str(scene.trace))) > 0
    assert scene.worker.running
    assert set(scene.worker.child_pids()) == pids
    assert "Unrecoverable error" not in scene.worker.log()
    scene.nothing_left()


@pytest.mark.parametrize("pool", _pools("threads", "prefork"))
def test_two_slots_among_four(scene):
    """limit=2 in four threads, or processes: two runs of the key at once, never three; each has its own lock and run."""
    results = [scene.dispatch("work_two", f"c{number}", 0.3) for number in range(10)]
    assert [scene.stage.get(result) for result in results] == [scene.call(f"c{number}") for number in range(10)]
    spans = scene.trace.spans()
    assert highest_overlap(spans) == 2
    assert len({span.token for span in spans}) == 10
    fences = [event.fence for event in scene.trace.events("start")]
    assert len(set(fences)) == 10
    scene.nothing_left()
