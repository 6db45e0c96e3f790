"""The lock of a run lives as long as the process that runs it, whoever dies, stops or is cut off beside it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_guard import LockLost
from celery_guard.decisions import Holder
from tests.services import RedisServer, wait_until
from tests.services.stage import Stage, alive
from tests.services.trace import Event, Trace, highest_overlap

pytestmark = pytest.mark.xdist_group("heartbeat")

TASKS = "tests.services.chaos_tasks"
LEASE = 3.0
#: Far above what anything here takes: one lease, a postponement, a worker's start.
TIMEOUT = 30.0


class Scene:
    """One test's lock and calls, on what the module's tests share."""

    def __init__(self, stage: Stage, directory: Path) -> None:
        self.stage = stage
        self.store = stage.store
        self.trace = Trace(directory / "trace")
        self.directory = directory
        self.key = f"key-{directory.name}"

    def call(self, call: str) -> str:
        """The call's name, and with it its claim, which no other test has."""
        return f"{self.key}-{call}"

    def file(self, call: str) -> str:
        """The file that lets the call end."""
        return str(self.directory / f"{call}.go")

    def let_go(self, call: str) -> None:
        Path(self.file(call)).touch()

    def dispatch(self, name: str, call: str, *more: Any, queue: str = "celery") -> Any:
        return self.stage.task(f"{TASKS}.{name}").apply_async((self.call(call), self.key, str(self.trace), *more), queue=queue)

    def hold(self, call: str, name: str = "hold", queue: str = "celery") -> Any:
        """Dispatch a call that ends when it is let go."""
        return self.dispatch(name, call, self.file(call), queue=queue)

    def wait_for(self, what: str, call: str) -> Event:
        """The first such event of a call."""
        wait_until(lambda: self.trace.events(what, call=self.call(call)), TIMEOUT, lambda: f"{what} of {call} in {self.trace.events()}{self.stage.logs()}")
        return self.trace.events(what, call=self.call(call))[0]

    def lock(self, name: str = "hold") -> str:
        """The lock of a task on this test's key."""
        return f"{TASKS}.{name}:{self.key}"

    def holders(self, name: str = "hold") -> tuple[Holder, ...]:
        lock = self.store.get_lock(self.lock(name))
        return lock.holders if lock is not None else ()

    def tokens(self, name: str = "hold") -> list[str]:
        return [holder.token for holder in self.holders(name)]

    def postponed(self, result: Any) -> None:
        """Wait until the call was sent back because the lock is busy."""
        self.stage.state(result, "RETRY", timeout=TIMEOUT)

    def renewed(self, seconds: float, name: str = "hold") -> None:
        """Wait until the lease has been extended to ``seconds`` beyond where it ends now: that takes about as long."""
        before = self.holders(name)[0]

        def extended() -> bool:
            now = self.holders(name)
            assert [holder.token for holder in now] == [before.token]
            return now[0].expires_at >= before.expires_at + seconds

        wait_until(extended, TIMEOUT, lambda: f"lease extended, have {self.holders(name)}")

    def free(self, name: str = "hold") -> None:
        wait_until(lambda: not self.holders(name), TIMEOUT, lambda: f"free lock, but {self.holders(name)}")


@pytest.fixture(scope="module")
def locks() -> Iterator[RedisServer]:
    """The server of the lock store alone."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def stage(locks: RedisServer) -> Iterator[Stage]:
    conf = {
        "guard_store_backend": locks.url(),
        # No message comes a second time: what is seen here are runs, not copies.
        "broker_transport_options": {"visibility_timeout": 3600},
        # With JSON Celery keeps no more of an exception than its text.
        "accept_content": ["json", "pickle"],
        "result_serializer": "pickle",
    }
    with Stage(TASKS, **conf) as stage:
        stage.worker(concurrency=4)
        yield stage


@pytest.fixture
def scene(stage: Stage, tmp_path: Path) -> Scene:
    return Scene(stage, tmp_path)


def test_bodies_longer_than_their_lease_keep_their_lock(scene):
    """A body three times longer than its lease keeps its lock, whether it waits or computes: the next one on the key starts after its end."""
    names = ("work", "spin")
    firsts = [scene.dispatch(name, f"{name}-1", 3 * LEASE) for name in names]
    for name in names:
        scene.wait_for("start", f"{name}-1")
    seconds = [scene.dispatch(name, f"{name}-2", 0.0) for name in names]
    for result in firsts + seconds:
        scene.stage.get(result)
    for name in names:
        first, second = (next(span for span in scene.trace.spans() if span.call == scene.call(f"{name}-{number}")) for number in (1, 2))
        assert first.end is not None
        assert first.end - first.start >= 3 * LEASE
        assert second.start >= first.end
    assert len(scene.trace.spans()) == 4


@pytest.mark.smoke
def test_run_learns_that_its_slot_was_taken_away(scene):
    """A run whose slot was taken away learns it; the run that took the lock is left alone by the first one's late end, whose result stays."""
    first = scene.hold("first")
    started = scene.wait_for("start", "first")
    assert scene.store.force_release_slot(scene.lock(), started.token)
    second = scene.hold("second")
    taken = scene.wait_for("start", "second")
    assert scene.wait_for("lost", "first").checked == scene.lock()
    assert taken.fence > started.fence
    scene.let_go("first")
    assert scene.stage.get(first) == scene.call("first")
    assert scene.tokens() == [taken.token]
    scene.renewed(LEASE / 3)
    scene.let_go("second")
    assert scene.stage.get(second) == scene.call("second")
    scene.free()
    assert first.state == "SUCCESS"
    assert not scene.trace.happened("lost", call=scene.call("second"))


def test_abort_raises_in_the_body(scene):
    """on_lost="abort": the body gets LockLost; the task fails with it, and with the names of task, lock and run."""
    result = scene.hold("first", "hold_or_abort")
    started = scene.wait_for("start", "first")
    assert scene.store.force_release_slot(scene.lock("hold_or_abort"), started.token)
    scene.wait_for("aborted", "first")
    scene.stage.state(result, "FAILURE")
    error = result.result
    assert isinstance(error, LockLost)
    assert (error.task, error.key, error.token) == (f"{TASKS}.hold_or_abort", scene.lock("hold_or_abort"), started.token)
    scene.let_go("second")
    scene.stage.get(scene.hold("second", "hold_or_abort"))
    assert not scene.trace.happened("aborted", call=scene.call("second"))


def test_stopped_worker_wakes_up_without_its_lock(scene):
    """A worker that was stopped for longer than its lease finds that another took the lock, and takes nothing away from it."""
    with scene.stage.working(queues=["stopped"], concurrency=1) as worker:
        first = scene.hold("first", queue="stopped")
        scene.wait_for("start", "first")
        worker.kill(signal.SIGSTOP, group=True)
        try:
            second = scene.hold("second")
            taken = scene.wait_for("start", "second")
        finally:
            worker.kill(signal.SIGCONT, group=True)
        assert scene.wait_for("lost", "first").checked == scene.lock()
        scene.let_go("first")
        assert scene.stage.get(first) == scene.call("first")
    assert scene.tokens() == [taken.token]
    scene.renewed(LEASE / 3)
    scene.let_go("second")
    assert scene.stage.get(second) == scene.call("second")
    assert not scene.trace.happened("lost", call=scene.call("second"))
    scene.free()


def test_stopped_worker_takes_a_free_lock_again(scene):
    """A worker that was stopped for longer than its lease takes its lock again where nobody came in between, and the next one waits for its end."""
    with scene.stage.working(queues=["stopped"], concurrency=1) as worker:
        first = scene.hold("first", queue="stopped")
        started = scene.wait_for("start", "first")
        worker.kill(signal.SIGSTOP, group=True)
        try:
            scene.free()
        finally:
            worker.kill(signal.SIGCONT, group=True)
        wait_until(lambda: scene.tokens() == [started.token], TIMEOUT, lambda: f"lock taken again, have {scene.holders()}")
        second = scene.dispatch("hold", "second", scene.file("first"))
        scene.postponed(second)
        scene.let_go("first")
        assert scene.stage.get(first) == scene.call("first")
        assert scene.stage.get(second) == scene.call("second")
    assert highest_overlap(scene.trace.spans()) == 1


def test_child_that_outlives_its_main_process_keeps_its_lock(scene):
    """The heartbeat is in the process that runs the body: where a child goes on without its main process, its lock is held until its body ends.

    On Linux Celery lets its children die with the main process, unless, as here, the body forbids it.
    """
    with scene.stage.working(queues=["orphan"], concurrency=1) as worker:
        scene.hold("first", "outlive", queue="orphan")
        started = scene.wait_for("start", "first")
        worker.kill()
        worker.wait()
        second = scene.hold("second", "outlive")
        scene.postponed(second)
        scene.renewed(2 * LEASE, "outlive")
        assert alive(started.pid)
        assert not scene.trace.happened("start", call=scene.call("second"))
        scene.let_go("second")
        scene.let_go("first")
        assert scene.stage.get(second) == scene.call("second")
    first, after = scene.trace.spans()
    assert first.end is not None
    assert after.start >= first.end


def test_killed_connections_are_made_again(scene, locks):
    """Three times all connections to the store are cut in one run: the lock is held and extended, the body is not disturbed (R084)."""
    first = scene.hold("first", "hold_or_abort")
    started = scene.wait_for("start", "first")
    name = f"celery-guard:{started.pid}"
    with redis.Redis.from_url(locks.url()) as client:
        gone: set[str] = set()

        def connections() -> set[str]:
            """Those that the run's process has made since the last cut."""
            return {each["id"] for each in client.client_list() if each["name"] == name} - gone

        for _ in range(3):
            gone |= wait_until(connections, TIMEOUT, f"connection of {name}")
            assert client.client_kill_filter(_type="normal", skipme=True) >= 1
        wait_until(connections, TIMEOUT, f"connection of {name}")
    scene.renewed(LEASE / 3, "hold_or_abort")
    second = scene.dispatch("hold_or_abort", "second", scene.file("first"))
    scene.postponed(second)
    assert scene.tokens("hold_or_abort") == [started.token]
    scene.let_go("first")
    scene.stage.get(first)
    scene.stage.get(second)
    assert {event.what for event in scene.trace.events()} == {"start", "end"}
    assert highest_overlap(scene.trace.spans()) == 1


def test_max_hold_lets_the_next_one_begin(scene):
    """After max_hold the lease is not extended any more: the next run begins while the first still runs, and the first learns it."""
    name = "hold_for_a_lease"
    first = scene.hold("first", name)
    started = scene.wait_for("start", "first")
    second = scene.hold("second", name)
    taken = scene.wait_for("start", "second")
    assert taken.at - started.at > LEASE
    assert scene.wait_for("lost", "first").checked == scene.lock(name)
    scene.let_go("first")
    scene.stage.get(first)
    assert scene.tokens(name) == [taken.token]
    scene.let_go("second")
    scene.stage.get(second)
    scene.free(name)


def test_forked_process_neither_extends_nor_releases(scene):
    """What a body forks has no part in its lock: its end releases nothing, and its life extends nothing (R082)."""
    with scene.stage.working(queues=["forks"], concurrency=1) as worker:
        first = scene.dispatch("fork", "first", scene.file("first"), scene.file("grandchild-1"), queue="forks")
        started = scene.wait_for("start", "first")
        grandchild = scene.wait_for("grandchild", "first")
        scene.let_go("grandchild-1")
        wait_until(lambda: not alive(grandchild.pid), TIMEOUT, "end of the grandchild")
        scene.renewed(LEASE / 3, "fork")
        assert scene.tokens("fork") == [started.token]
        scene.let_go("first")
        scene.stage.get(first)
        scene.free("fork")
        scene.dispatch("fork", "second", scene.file("second"), scene.file("grandchild-2"), queue="forks")
        grandchild = scene.wait_for("grandchild", "second")
        assert scene.holders("fork")
        worker.close()
        try:
            scene.free("fork")
            assert alive(grandchild.pid)
        finally:
            scene.let_go("grandchild-2")
        wait_until(lambda: not alive(grandchild.pid), TIMEOUT, "end of the grandchild")


def test_one_process_takes_the_same_lock_again_at_once(scene):
    """Many short runs on one key, one behind the other in one process: no heartbeat of an ended run touches the lock of the next (R076)."""
    runs = 150
    with scene.stage.working(queues=["again"], concurrency=1) as worker:
        results = [scene.dispatch("work", f"c{number}", 0.03, queue="again") for number in range(runs)]
        for result in results:
            scene.stage.get(result)
        log = worker.log()
    spans = scene.trace.spans()
    assert len({span.pid for span in spans}) == 1
    assert len({span.token for span in spans}) == runs
    assert highest_overlap(spans) == 1
    assert spans[-1].start - spans[0].start > LEASE
    fences = [event.fence for event in scene.trace.events("start")]
    assert fences == sorted(set(fences))
    assert "lock_lost" not in log
    assert "lock_expired" not in log
    assert scene.store.get_lock(scene.lock("work")) is None
