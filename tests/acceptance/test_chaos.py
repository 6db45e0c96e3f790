"""Kill everything all the time: the promise holds, and nothing is left behind."""

from __future__ import annotations

import random
import signal
import time

import pytest
import redis

from celery_guard.guard import Guard
from tests.services import AppEnvironment, wait_until
from tests.services.trace import Trace, highest_overlap, note

TASKS = "tests.services.chaos_tasks"
KEYS = 5
CALLS = 200
ENDED = {"SUCCESS", "FAILURE"}


@pytest.fixture
def app_environment(redis_url):
    return AppEnvironment(redis_url, conf={"guard_max_crashes": 10})


@pytest.fixture
def trace(tmp_path):
    return Trace(tmp_path / "trace")


class Killer:
    """Kills one child every second, and one whole worker every five, which it starts again."""

    def __init__(self, workers, trace, seed, in_transit):
        self.workers = workers
        self.in_transit = in_transit
        self.trace = trace
        self.chance = random.Random(seed)
        self.children = self.whole = 0
        self.next_child = time.monotonic() + 0.5
        self.next_worker = time.monotonic() + 3

    def revive(self):
        for worker in self.workers:
            # Celery gives up when a child dies before its pool is up; whoever runs workers starts them again.
            if not worker.running:
                note(self.trace.path, "kill", pids=[worker.pid])
                worker.close()
                worker.start()

    def act(self):
        self.revive()
        now = time.monotonic()
        if now >= self.next_worker:
            worker = self.chance.choice(self.workers)
            worker.kill(signal.SIGSTOP)
            if self.in_transit():
                worker.kill(signal.SIGCONT)
                return
            self.next_worker += 5
            pids = worker.child_pids()
            note(self.trace.path, "kill", pids=pids)
            worker.close()
            worker.start()
            self.whole += 1
        elif now >= self.next_child:
            self.next_child += 1
            pids = [pid for worker in self.workers for pid in worker.child_pids()]
            if pids:
                pid = self.chance.choice(pids)
                note(self.trace.path, "kill", pids=[pid])
                signal_if_there(pid)
                self.children += 1


def signal_if_there(pid):
    import os
    from contextlib import suppress

    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("name", "limit"), [("work", 1), ("work_two", 2)])
def test_kills_never_let_more_runs_overlap_than_the_limit(name, limit, app_factory, worker_factory, trace):
    """However children and workers die: never more than ``limit`` runs per key, every task ends, no claim or slot stays, no retry is spent."""
    app = app_factory(TASKS)
    store = Guard(app).store
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    workers = [worker_factory(TASKS, concurrency=4) for _ in range(2)]
    task = app.tasks[f"{TASKS}.{name}"]
    results = [task.delay(f"c{n}", f"k{n % KEYS}", str(trace), seconds=chance.uniform(0.02, 0.2)) for n in range(CALLS)]
    broker = redis.Redis.from_url(app.conf.broker_url)

    def in_transit():
        """Waiting tasks that are in no list of the broker: kombu notes a message as unacknowledged some time after it took it, and a kill
        in between loses it, guard or no guard (kombu/transport/redis.py, 5.4 to 5.7)."""
        done = trace.calls("end")
        with broker.pipeline(transaction=True) as pipe:
            queued, unacked = pipe.lrange("celery", 0, -1).hvals("unacked").execute()
        held = b"".join([*queued, *unacked])
        return [result.id for number, result in enumerate(results) if f"c{number}" not in done and result.id.encode() not in held]

    killer = Killer(workers, trace, seed, in_transit)
    started = time.monotonic()

    def ended():
        return {result.id for result in results if result.state in ENDED}

    def all_started_or_time_over():
        killer.act()
        return time.monotonic() - started > 20 or len(trace.calls("end")) == CALLS

    wait_until(all_started_or_time_over, 40, interval=0.05)

    def unfinished():
        killer.revive()
        return CALLS - len(ended())

    wait_until(lambda: not unfinished(), 90, lambda: f"seed {seed}: {unfinished()} tasks have not ended", interval=0.5)
    spans = trace.spans()
    wait_until(lambda: not store.list_claims() and not store.list_locks(), 3 * 3, lambda: f"{store.list_claims()} {store.list_locks()}")
    for key in {span.key for span in spans}:
        assert highest_overlap(span for span in spans if span.key == key) <= limit, f"seed {seed}, key {key}"
    assert {result.state for result in results} == {"SUCCESS"}
    assert trace.calls("end") == {f"c{n}" for n in range(CALLS)}
    assert {event.retries for event in trace.events("start")} == {0}
    assert killer.children >= 3
    assert killer.whole >= 1
    print(f"seed {seed}: {killer.children} children, {killer.whole} workers, {sum(span.killed for span in spans)} runs killed, {len(spans)} runs")
