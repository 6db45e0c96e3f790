"""The lock store away, empty, slow or forgetful, with the broker on another server: nothing is lost, nothing hangs, nothing stays."""

from __future__ import annotations

import os
import signal
import time

import pytest
import redis
from kombu.exceptions import OperationalError

from celery_guard import StoreUnavailable
from celery_guard.guard import Guard
from tests.services import AppEnvironment, wait_until
from tests.services.trace import Trace, highest_overlap

TASKS = "tests.services.chaos_tasks"
QUICK = {"guard_store_timeout": 1.0, "guard_store_connect_timeout": 0.5, "guard_lease": 3.0}


@pytest.fixture
def store_server(private_redis):
    return private_redis()


@pytest.fixture
def trace(tmp_path):
    return Trace(tmp_path / "trace")


@pytest.fixture
def environment(redis_url, store_server):
    """Broker and results on one server, the guard's store on another."""

    def make(**conf):
        return AppEnvironment(redis_url, conf={"guard_store_backend": store_server.url(0), **conf})

    return make


def send(app, trace, number, seconds=0.1):
    return app.tasks[f"{TASKS}.work"].delay(f"c{number}", f"k{number % 5}", str(trace), seconds=seconds)


def settled(app, results, trace, timeout=120):
    """Wait until every task has ended well and nothing is held; no two runs of a key may have overlapped."""

    def unfinished():
        return [(result.id, result.state) for result in results if result.state != "SUCCESS"]

    wait_until(lambda: not unfinished(), timeout, lambda: str(unfinished()), interval=0.2)
    store = Guard(app).store

    def nothing_held():
        try:
            return not store.list_claims() and not store.list_locks()
        except StoreUnavailable:
            return False

    wait_until(nothing_held, 30, lambda: f"{store.list_claims()} {store.list_locks()}")
    assert {span.call for span in trace.spans()} == {f"c{number}" for number in range(len(results))}
    return trace.spans()


def test_store_killed_and_restarted_empty(environment, app_factory, worker_factory, store_server, trace):
    """50 tasks while the store dies and comes back without its data: all end, the workers live, and nothing stays."""
    app = app_factory(TASKS, environment(**QUICK))
    workers = [worker_factory(TASKS, environment=environment(**QUICK)) for _ in range(2)]
    results = [send(app, trace, number) for number in range(50)]
    wait_until(lambda: len(trace.calls("end")) >= 5, 60, "the first have ended")
    store_server.kill()
    time.sleep(1.5)  # the length of the outage, which is what is tested
    store_server.start_again()
    settled(app, results, trace)
    assert all(worker.running for worker in workers)


def test_scripts_flushed_again_and_again(environment, app_factory, worker_factory, store_server, trace):
    """A server that forgets its scripts is told them again, in the middle of everything; nothing overlaps."""
    app = app_factory(TASKS, environment(**QUICK))
    worker_factory(TASKS, environment=environment(**QUICK), concurrency=4)
    client = redis.Redis.from_url(store_server.url(0))
    results = []
    for number in range(50):
        results.append(send(app, trace, number, 0.02))
        client.script_flush()

    def flush():
        client.script_flush()
        return len(trace.calls("end")) == 50

    wait_until(flush, 90, "all have ended", interval=0.05)
    spans = settled(app, results, trace)
    assert all(highest_overlap(span for span in spans if span.key == key) == 1 for key in {span.key for span in spans})


def test_store_pauses_for_ten_seconds(environment, app_factory, worker_factory, store_server, trace):
    """A server that answers nothing for 10 s, with the default time-outs: all tasks end, and other tasks of the worker go on."""
    app = app_factory(TASKS, environment())
    worker = worker_factory(TASKS, environment=environment(), concurrency=4)
    results = [send(app, trace, number) for number in range(50)]
    wait_until(lambda: len(trace.calls("end")) >= 5, 60, "the first have ended")
    redis.Redis.from_url(store_server.url(0)).client_pause(10_000)
    begun = time.monotonic()
    pong = app.control.ping(timeout=5.0)
    assert pong, "the worker's main process does not answer"
    assert time.monotonic() - begun < 9
    settled(app, results, trace)
    assert worker.running


def test_a_paused_store_does_not_stop_the_workers_main_process(environment, app_factory, worker_factory, store_server, trace, tmp_path):
    """A child is killed while the store answers nothing: the main process gives back from its backlog, and serves others meanwhile."""
    app = app_factory(TASKS, environment())
    worker = worker_factory(TASKS, environment=environment(), concurrency=2)
    gate = tmp_path / "gate"
    result = app.tasks[f"{TASKS}.hold"].delay("a", "k", str(trace), str(gate))
    wait_until(lambda: trace.happened("start"), 30, "started")
    store_server.pause()
    try:
        victim = trace.events("start")[0].pid
        os.kill(victim, signal.SIGKILL)
        plain = [app.tasks[f"{TASKS}.plain"].delay(f"p{number}", str(trace)) for number in range(5)]
        wait_until(lambda: len(trace.events("plain")) == 5, 20, "plain tasks run")
        assert plain
    finally:
        store_server.resume()
    gate.touch()
    wait_until(lambda: result.state == "SUCCESS", 60, lambda: result.state)
    store = Guard(app).store
    wait_until(lambda: not store.list_claims() and not store.list_locks(), 30, "nothing left")
    assert worker.running


@pytest.mark.smoke
def test_dispatch_while_the_store_is_down(environment, app_factory, store_server, trace, redis_url):
    """``raise``: an error that names the server without password, soon, and nothing is sent. ``dispatch``: it is sent."""
    app = app_factory(TASKS, environment(**QUICK))
    store_server.kill()
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"redis://127\.0\.0\.1"):
        send(app, trace, 0)
    assert time.monotonic() - begun < 10
    client = redis.Redis.from_url(redis_url)
    assert client.llen("celery") == 0
    sloppy = app_factory(TASKS, environment(**QUICK, guard_on_store_error="dispatch"))
    send(sloppy, trace, 0)
    assert client.llen("celery") == 1


def test_a_dispatch_into_a_pause_leaves_no_claim_behind(environment, app_factory, store_server, trace):
    """The claim may have been taken although its answer came too late: it is released when the store is back."""
    app = app_factory(TASKS, environment(**QUICK))
    send(app, trace, 1)  # over a connection that is used again
    store_server.pause()
    begun = time.monotonic()
    try:
        with pytest.raises(StoreUnavailable) as raised:
            send(app, trace, 0)
        assert raised.value.uncertain
        assert time.monotonic() - begun < 10
    finally:
        store_server.resume()
    guard = Guard(app)
    assert guard.backlog.flush(60)
    wait_until(lambda: [claim.resource for claim in guard.store.list_claims()] == [f"{TASKS}.work:c1"], 30, lambda: str(guard.store.list_claims()))


def test_execution_without_the_store_as_the_setting_says(environment, app_factory, worker_factory, store_server, trace):
    """``run`` runs unguarded; ``requeue``, the default, waits for the store."""
    conf = {**QUICK, "guard_on_store_error": "dispatch"}
    app = app_factory(TASKS, environment(**conf))
    store_server.kill()
    worker_factory(TASKS, environment=environment(**conf, guard_on_store_error_at_execution="run"), queues=["run"])
    worker_factory(TASKS, environment=environment(**conf), queues=["requeue"])
    runs = app.tasks[f"{TASKS}.work"].apply_async(("r", "k", str(trace)), queue="run")
    waits = app.tasks[f"{TASKS}.work"].apply_async(("w", "k", str(trace)), queue="requeue")
    assert runs.get(timeout=60) == "r"
    wait_until(lambda: waits.state == "RETRY", 60, lambda: waits.state)
    assert not trace.happened("start", call="w")
    store_server.start_again()
    assert waits.get(timeout=90) == "w"
    store = Guard(app).store
    wait_until(lambda: not store.list_claims() and not store.list_locks(), 30, lambda: f"{store.list_claims()} {store.list_locks()}")


def test_broker_down_after_the_claim(private_redis, app_factory, trace, store_server):
    """Publishing fails: the error reaches the caller, the claim is free, and the next dispatch is accepted."""
    broker = private_redis()
    conf = {"guard_store_backend": store_server.url(0), "result_backend": store_server.url(1), "task_publish_retry": False, **QUICK}
    app = app_factory(TASKS, AppEnvironment(broker.url(0), conf=conf))
    broker.kill()
    with pytest.raises(OperationalError):
        send(app, trace, 0)
    assert Guard(app).store.list_claims() == []
    broker.start_again()
    assert send(app, trace, 0).duplicate is False


def test_a_user_without_rights_to_look_around(private_redis, redis_url, app_factory, worker_factory, trace):
    """No CONFIG, INFO, SCRIPT or CLIENT: the worker starts, guards, and says nothing wrong about what it cannot see."""
    server = private_redis()
    client = redis.Redis.from_url(server.url(0))
    client.execute_command("ACL", "SETUSER", "guard", "on", ">s3cr#t", "~guard:*", "+@all", "-config", "-info", "-script", "-client")
    conf = {"guard_store_backend": f"redis://guard:s3cr%23t@127.0.0.1:{server.port}/0", **QUICK}
    app = app_factory(TASKS, AppEnvironment(redis_url, conf=conf))
    worker = worker_factory(TASKS, environment=AppEnvironment(redis_url, conf=conf))
    assert send(app, trace, 0).get(timeout=30) == "c0"
    log = worker.log(whole=True)
    assert "Traceback" not in log
    assert "NOPERM" not in log
    assert "s3cr" not in log
