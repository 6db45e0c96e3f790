"""Two servers of which one is away at the worst moment: between a refusal and the next delivery, before an exit, before a shutdown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from celery import signals

from celery_guard import StoreUnavailable
from celery_guard.guard import Guard
from tests.services import AppEnvironment, wait_until
from tests.services.trace import Trace, highest_overlap

TASKS = "tests.services.chaos_tasks"
ROOT = Path(__file__).parents[2]
QUICK = {"guard_store_timeout": 1.0, "guard_store_connect_timeout": 0.5}
#: Dispatches once while all is well, and once when it is told that the store hangs; then it ends.
SCRIPT = f"""
import sys
from celery_guard import StoreUnavailable
from {TASKS} import work
work.delay("before", "k", "/dev/null")
print("ready", flush=True)
sys.stdin.readline()
try:
    work.delay("during", "k", "/dev/null")
except StoreUnavailable as exc:
    print("uncertain" if exc.uncertain else exc, flush=True)
"""


@pytest.fixture
def store_server(private_redis):
    return private_redis()


@pytest.fixture
def trace(tmp_path):
    return Trace(tmp_path / "trace")


def claims(app):
    return [claim.resource for claim in Guard(app).store.list_claims()]


def nothing_held(app):
    store = Guard(app).store
    wait_until(lambda: not store.list_claims() and not store.list_locks(), 30, lambda: f"{store.list_claims()} {store.list_locks()}")


@pytest.mark.smoke
def test_a_program_that_ends_gives_back_what_it_did_not_send(redis_url, store_server, app_factory):
    """A dispatch failed in a hanging store and may have left a claim: the program's exit waits for its release, or work would be refused for a ttl."""
    environment = AppEnvironment(redis_url, conf={"guard_store_backend": store_server.url(), **QUICK})
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env={**os.environ, **environment.variables()}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            assert program.stdout.readline() == "ready\n"
            store_server.pause()
            program.stdin.write("go\n")
            program.stdin.flush()
            assert program.stdout.readline() == "uncertain\n"
            store_server.resume()
            assert program.wait(60) == 0
        finally:
            store_server.resume()
            program.kill()
    assert claims(app_factory(TASKS, environment)) == [f"{TASKS}.work:before"]


def test_a_child_of_the_pool_that_ends_does_the_same(redis_url, store_server, app_factory, trace):
    """A pool's child ends without Python's exit; Celery's signal is its only word."""
    app = app_factory(TASKS, AppEnvironment(redis_url, conf={"guard_store_backend": store_server.url(), **QUICK}))
    work = app.tasks[f"{TASKS}.work"]
    work.delay("before", "k", str(trace))
    store_server.pause()
    try:
        with pytest.raises(StoreUnavailable):
            work.delay("during", "k", str(trace))
    finally:
        store_server.resume()
    signals.worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=0)
    assert len(Guard(app).backlog) == 0
    assert claims(app) == [f"{TASKS}.work:before"]


def test_postponing_while_the_broker_is_away(private_redis, redis_url, store_server, app_factory, worker_factory, trace, tmp_path):
    """The lock is busy and the broker dead for seconds, so that the message can neither run nor be sent again: it runs, once, when both are there."""
    broker = private_redis()
    environment = AppEnvironment(redis_url, conf={"broker_url": broker.url(), "guard_store_backend": store_server.url(), "guard_store_timeout": 60.0})
    app = app_factory(TASKS, environment)
    worker = worker_factory(TASKS, environment=environment)
    hold, gate = app.tasks[f"{TASKS}.hold"], tmp_path / "gate"
    first = hold.delay("first", "k", str(trace), str(gate))
    wait_until(lambda: trace.happened("start", call="first"), 30, trace.events)
    second = hold.delay("second", "k", str(trace), str(gate))
    wait_until(lambda: "postponed_overlap" in worker.log(), 30, worker.log)
    store_server.pause()  # the next try waits for its answer until the broker is dead
    try:
        received = f"{TASKS}.hold[{second.id}] received"
        tries = worker.log().count(received)
        wait_until(lambda: worker.log().count(received) > tries, 30, worker.log)
        wait_until(lambda: all(task.id in broker.command("HVALS", "unacked") for task in (first, second)), 30, "the broker knows who has both")
        assert broker.command("SAVE").startswith("+OK")
        broker.kill()
    finally:
        store_server.resume()
    # kombu's own reconnection may fail on what is unacknowledged (its 5.7: 'NoneType' object has no attribute 'hostname'), and end the worker.
    wait_until(lambda: "Trying again in 4.00 seconds" in worker.log() or "Unrecoverable error" in worker.log(), 60, worker.log)
    broker.start_again()
    gate.touch()

    def ended():
        if not worker.running:
            worker.close()
            worker.start()
        return (first.state, second.state) == ("SUCCESS", "SUCCESS")

    wait_until(ended, 90, lambda: f"{first.state} {second.state} {trace.events()}", interval=0.2)
    nothing_held(app)
    spans = [span for span in trace.spans() if span.key == "k"]
    assert highest_overlap(spans) == 1
    assert [span.call for span in spans].count("second") == 1
    assert {event.retries for event in trace.events("start")} == {0}


@pytest.mark.parametrize("away", ["dead", "hanging"])
def test_shutdown_does_not_wait_for_a_store_that_is_away(away, redis_url, store_server, app_factory, worker_factory, trace, tmp_path):
    """A killed child's lock cannot be given back: the main process goes on answering, and a worker that is told to end does."""
    environment = AppEnvironment(redis_url, conf={"guard_store_backend": store_server.url(), **QUICK})
    app = app_factory(TASKS, environment)
    worker = worker_factory(TASKS, environment=environment)
    app.tasks[f"{TASKS}.hold"].delay("a", "k", str(trace), str(tmp_path / "gate"))
    wait_until(lambda: trace.happened("start"), 30, trace.events)
    try:
        store_server.kill() if away == "dead" else store_server.pause()
        os.kill(trace.events("start")[0].pid, signal.SIGKILL)
        wait_until(lambda: "is postponed" in worker.log(), 60, worker.log)  # its message came back, and found no store either
        assert app.control.ping(destination=[worker.hostname], timeout=10.0)
        worker.kill(signal.SIGTERM)
        worker.wait(45)
    finally:
        store_server.resume()
