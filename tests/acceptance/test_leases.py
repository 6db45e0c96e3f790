"""Leases and heartbeats on real workers: kept, lost, taken again, and never somebody else's."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest
import redis

from celery_guard.guard import Guard
from tests.services import wait_until
from tests.services.trace import Trace, highest_overlap

TASKS = "tests.services.chaos_tasks"
LEASE = 3.0


class Scene:
    """An app, its store, and a log that the tasks write."""

    def __init__(self, app, tmp_path):
        self.app = app
        self.store = Guard(app).store
        self.trace = Trace(tmp_path / "trace")
        self.folder = tmp_path
        self.files = []

    def send(self, name, call, key, *args, **options):
        return self.app.tasks[f"{TASKS}.{name}"].apply_async((call, key, str(self.trace), *args), **options)

    def gate(self):
        """A file that a body waits for."""
        path = self.folder / f"gate{len(self.files)}"
        self.files.append(path)
        return path

    def seen(self, what, timeout=30, **fields):
        wait_until(lambda: self.trace.happened(what, **fields), timeout, lambda: f"{what} {fields}: {self.trace.events()}")
        return self.trace.events(what, **fields)[-1]

    def holders(self, key, name="hold"):
        lock = self.store.get_lock(f"{TASKS}.{name}:{key}")
        return [] if lock is None else list(lock.holders)

    def nothing_left(self, timeout=LEASE * 3):
        wait_until(lambda: not self.store.list_claims() and not self.store.list_locks(), timeout, lambda: f"{self.store.list_claims()} {self.store.list_locks()}")


@pytest.fixture
def scene(app_factory, tmp_path):
    scene = Scene(app_factory(TASKS), tmp_path)
    yield scene
    for path in scene.files:
        path.touch()


@pytest.mark.smoke
def test_a_body_longer_than_its_lease_keeps_its_lock(scene, worker_factory):
    """Three leases long, and a second run of that key waits for its end."""
    worker_factory(TASKS, concurrency=2)
    first = scene.send("work", "a", "k", 3 * LEASE)
    scene.seen("start", call="a")
    second = scene.send("work", "b", "k", 0.0)
    assert (first.get(timeout=60), second.get(timeout=60)) == ("a", "b")
    spans = scene.trace.spans()
    assert [span.call for span in spans] == ["a", "b"]
    assert highest_overlap(spans) == 1
    assert spans[0].end - spans[0].start >= 3 * LEASE
    assert {event.retries for event in scene.trace.events("start")} == {0}
    scene.nothing_left()


def test_a_body_whose_slot_is_taken_away_learns_it_and_leaves_the_next_alone(scene, worker_factory):
    """An operator takes the slot; the run sees ``lost``, ends as SUCCESS all the same, and its release does not touch the next holder."""
    worker_factory(TASKS, concurrency=2)
    gate, other = scene.gate(), scene.gate()
    first = scene.send("hold", "a", "k", str(gate))
    begun = scene.seen("start", call="a")
    assert scene.store.force_release_slot(f"{TASKS}.hold:k", begun.token)
    assert not scene.store.force_release_slot(f"{TASKS}.hold:k", begun.token)
    second = scene.send("hold", "b", "k", str(other))
    later = scene.seen("start", call="b")
    assert scene.seen("lost", call="a").checked == f"{TASKS}.hold:k"
    assert later.fence > begun.fence
    gate.touch()
    assert first.get(timeout=30) == "a"
    assert [holder.token for holder in scene.holders("k")] == [later.token]
    other.touch()
    assert second.get(timeout=30) == "b"
    scene.nothing_left()


def test_on_lost_abort_raises_in_the_body(scene, worker_factory):
    """``on_lost="abort"``: the body ends with LockLost, which says which lock it was."""
    worker_factory(TASKS, concurrency=2)
    result = scene.send("hold_or_abort", "a", "k", str(scene.gate()))
    begun = scene.seen("start", call="a")
    assert scene.store.force_release_slot(f"{TASKS}.hold_or_abort:k", begun.token)
    scene.seen("aborted", call="a")
    wait_until(lambda: result.state == "FAILURE", 30, lambda: result.state)
    assert f"{TASKS}.hold_or_abort:k" in str(result.result)
    scene.nothing_left()


@pytest.mark.parametrize("taken", [True, False], ids=["another came", "nobody came"])
def test_a_worker_stopped_for_longer_than_its_lease(scene, worker_factory, taken):
    """Stopped and continued: if another took the lock, the loss is seen and nobody's lock is deleted; else it is taken again."""
    sleeper = worker_factory(TASKS, concurrency=1)
    gate, other = scene.gate(), scene.gate()
    first = scene.send("hold", "a", "k", str(gate))
    begun = scene.seen("start", call="a")
    sleeper.kill(signal.SIGSTOP, group=True)
    try:
        wait_until(lambda: not scene.holders("k"), 30, "the lease is over")
        if taken:
            worker_factory(TASKS, concurrency=1)
            second = scene.send("hold", "b", "k", str(other))
            later = scene.seen("start", call="b", timeout=60)
    finally:
        sleeper.kill(signal.SIGCONT, group=True)
    if taken:
        scene.seen("lost", call="a")
        gate.touch()
        wait_until(lambda: first.state == "SUCCESS", 30, lambda: first.state)
        assert [holder.token for holder in scene.holders("k")] == [later.token]
        other.touch()
        assert second.get(timeout=30) == "b"
    else:
        wait_until(lambda: [holder.token for holder in scene.holders("k")] == [begun.token], 30, "taken again")
        gate.touch()
        assert first.get(timeout=30) == "a"
    scene.nothing_left()


def test_a_killed_main_process_takes_its_children_along(scene, worker_factory):
    """Celery's children die with their main process (on Linux), so the lock ends with its lease, and not while the body runs."""
    worker = worker_factory(TASKS, concurrency=1)
    scene.send("hold", "a", "k", str(scene.gate()))
    begun = scene.seen("start", call="a")
    worker.kill(signal.SIGKILL)
    wait_until(lambda: not scene.holders("k"), LEASE * 5, "free")
    with pytest.raises(ProcessLookupError):
        os.kill(begun.pid, 0)


def test_a_killed_worker_is_out_within_one_lease(scene, worker_factory):
    """Main process and children gone: the key is free when the lease is over, and the job runs elsewhere."""
    worker = worker_factory(TASKS, concurrency=1)
    gate = scene.gate()
    scene.send("hold", "a", "k", str(gate))
    scene.seen("start", call="a")
    worker.kill(signal.SIGKILL, group=True)
    last = scene.holders("k")[0].expires_at
    wait_until(lambda: not scene.holders("k"), LEASE * 5, "free")
    assert last
    worker_factory(TASKS, concurrency=1)
    gate.touch()
    scene.seen("end", call="a", timeout=60)
    scene.nothing_left()


def test_dropped_connections_do_not_lose_the_lock(scene, worker_factory, redis_url):
    """The heartbeat reconnects; the body notices nothing (three times in one run)."""
    worker_factory(TASKS, concurrency=1)
    gate = scene.gate()
    result = scene.send("hold", "a", "k", str(gate))
    begun = scene.seen("start", call="a")
    client = redis.Redis.from_url(redis_url)
    for _ in range(3):
        expires = scene.holders("k")[0].expires_at
        for connection in client.client_list():
            if connection["name"].startswith("celery-guard:"):
                with suppress(redis.ResponseError):
                    client.client_kill_filter(_id=connection["id"])
        wait_until(lambda before=expires: scene.holders("k")[0].expires_at > before, 30, "renewed over a new connection")
    assert [holder.token for holder in scene.holders("k")] == [begun.token]
    gate.touch()
    assert result.get(timeout=30) == "a"
    assert not scene.trace.happened("lost")
    scene.nothing_left()


def test_max_hold_bounds_the_renewal(scene, worker_factory):
    """After ``max_hold`` the lease runs out, the run is told, and the next may begin."""
    worker_factory(TASKS, concurrency=2)
    gate, other = scene.gate(), scene.gate()
    scene.send("hold_for_a_lease", "a", "k", str(gate))
    scene.seen("start", call="a")
    scene.send("hold_for_a_lease", "b", "k", str(other))
    scene.seen("start", call="b", timeout=60)
    scene.seen("lost", call="a")
    gate.touch()
    other.touch()
    scene.seen("end", call="b")
    scene.nothing_left()


def test_a_grandchild_neither_renews_nor_releases(scene, worker_factory):
    """A process that the body forked knows nothing of the lock: killed with its parent's end, free within a lease."""
    worker = worker_factory(TASKS, concurrency=1)
    gate, grandchild = scene.gate(), scene.gate()
    scene.send("fork", "a", "k", str(gate), str(grandchild))
    scene.seen("grandchild", call="a")
    worker.kill(signal.SIGKILL, group=True)
    wait_until(lambda: not scene.holders("k", "fork"), LEASE * 5, "free although the grandchild lives")
    assert not scene.trace.happened("grandchild ends")
    grandchild.touch()
    scene.seen("grandchild ends")


def test_a_body_that_never_lets_go_of_the_interpreter_loses_its_lock_and_is_told(scene, worker_factory):
    """The documented limit: a C call longer than the lease stops the heartbeat. Nobody came, so the lock is taken again."""
    worker_factory(TASKS, concurrency=1)
    gate = scene.gate()
    result = scene.send("keep_the_gil", "a", "k", LEASE + 1, str(gate))
    begun = scene.seen("start", call="a")
    scene.seen("gil released", call="a")
    wait_until(lambda: [holder.token for holder in scene.holders("k", "keep_the_gil")] == [begun.token], 30, "taken again")
    gate.touch()
    wait_until(lambda: result.state == "SUCCESS", 30, lambda: result.state)
    scene.nothing_left()


def test_a_busy_interpreter_keeps_its_lock(scene, worker_factory):
    """A body of pure Python shares the interpreter, so the heartbeat goes on."""
    worker_factory(TASKS, concurrency=1)
    result = scene.send("spin", "a", "k", 2 * LEASE)
    scene.seen("start", call="a")
    wait_until(lambda: result.state == "SUCCESS", 60, lambda: result.state)
    assert len(scene.trace.spans()) == 1
    scene.nothing_left()


def test_one_process_takes_one_key_again_and_again(scene, worker_factory):
    """The heartbeat of a run that has ended never renews or frees the next one's slot."""
    worker_factory(TASKS, pool="solo")
    results = [scene.send("work", f"c{number}", "k", 0.0) for number in range(100)]
    assert [result.get(timeout=60) for result in results] == [f"c{number}" for number in range(100)]
    fences = [event.fence for event in scene.trace.events("start")]
    assert fences == sorted(fences)
    assert len(set(fences)) == 100
    scene.nothing_left()
