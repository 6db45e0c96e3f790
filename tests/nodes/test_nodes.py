"""Real nodes by pytest-celery: a Redis broker, a Redis result backend and a prefork worker, killed and restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import chord
from celery.exceptions import WorkerLostError
from pytest_celery import CeleryTestSetup, ping
from pytest_celery.vendors.worker.tasks import add, xsum

from tests.nodes.conftest import DOCKER
from tests.nodes.node_tasks import LEASE, define
from tests.services import wait_until


@pytest.fixture
def tasks(celery_setup: CeleryTestSetup) -> SimpleNamespace:
    """The node's tasks on the app of the test, with the only worker's queue as their default."""
    app = celery_setup.app
    app.conf.task_default_queue = celery_setup.worker.worker_queue
    return define(partial(app.task, shared=False))


@pytest.fixture
def results(celery_setup: CeleryTestSetup) -> Iterator[Any]:
    """Client of the result store, which the tasks count in."""
    with redis.Redis.from_url(celery_setup.backend.config()["host_url"]) as client:
        yield client


def test_all_nodes_answer(celery_setup):
    """Ping by task, by remote control and by container state; a chord runs through; logs can be read."""
    assert celery_setup.ready(ping=True, control=True, docker=True)
    queue = celery_setup.worker.worker_queue
    assert ping.s().apply_async(queue=queue).get(timeout=30) == "pong"
    assert chord([add.si(1, 1).set(queue=queue), add.si(2, 2).set(queue=queue)])(xsum.s().set(queue=queue)).get(timeout=30) == 6
    celery_setup.worker.assert_log_exists("succeeded in")
    assert celery_setup.worker.hostname() in celery_setup.app.control.ping()[0]


@pytest.mark.skipif(DOCKER, reason="pids of a container are not ours")
def test_a_killed_child_is_replaced(celery_setup, tasks):
    """The worker is a real prefork parent: its child can be killed, and tasks still run."""
    worker = celery_setup.worker
    child, parent = tasks.pids.delay().get(timeout=30)
    assert parent == worker.container._container.process.pid
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: child not in worker.container._container.process.child_pids(), 30)
    assert tasks.pids.delay().get(timeout=60)[1] == parent


def test_a_killed_worker_gets_its_task_back_after_its_restart(celery_setup, tasks, results):
    """SIGKILL ends the node with all its children; the late-acked task runs again on the restarted node."""
    worker = celery_setup.worker
    result = tasks.hold.delay("job")
    wait_until(lambda: results.get("job:starts") == b"1", 30, worker.logs)
    worker.kill()
    assert worker.container.status == "exited"
    results.set("job:go", 1)
    worker.restart()
    assert worker.container.status == "running"
    assert result.get(timeout=60) == "done"
    assert results.get("job:starts") == b"2"
    assert results.get("job:ends") == b"1"


def test_a_restarted_broker_is_found_again(celery_setup):
    """The worker reconnects to a broker that lost everything, and consumes."""
    queue = celery_setup.worker.worker_queue
    assert add.s(1, 2).apply_async(queue=queue).get(timeout=30) == 3
    celery_setup.broker.restart()
    assert add.s(2, 2).apply_async(queue=queue).get(timeout=60) == 4


def test_a_unique_task_is_dispatched_once_while_it_runs(celery_setup, tasks, results):
    """A duplicate gets the id and the result of the running task; after its end the key is free."""
    first = tasks.unique.delay("a")
    wait_until(lambda: results.get("a:starts") == b"1", 30, celery_setup.worker.logs)
    again = tasks.unique.delay("a")
    assert again.duplicate
    assert again.id == first.id
    results.set("a:go", 1)
    assert again.get(timeout=30) == "done"
    later = tasks.unique.delay("a")
    assert not later.duplicate
    assert later.get(timeout=30) == "done"
    assert results.get("a:starts") == b"2"


@pytest.mark.skipif(DOCKER, reason="pids of a container are not ours")
def test_a_killed_child_frees_its_lock_and_its_claim(celery_setup, tasks, results):
    """SIGKILL of the child in mid-run: the next task gets the lock, the same key can be dispatched again."""
    unique, locked = tasks.unique.delay("a"), tasks.locked.delay("b")
    wait_until(lambda: results.get("a:starts") == results.get("b:starts") == b"1", 30, celery_setup.worker.logs)
    for name in ("a", "b"):
        os.kill(int(results.get(f"{name}:pid")), signal.SIGKILL)
    for lost in (unique, locked):
        with pytest.raises(WorkerLostError):
            lost.get(timeout=60)
    results.mset({"a:go": 1, "b:go": 1, "c:go": 1})
    wait_until(lambda: not tasks.unique.delay("a").duplicate, 30, "claim free")
    assert tasks.locked.delay("c").get(timeout=60) == "done"


def test_a_killed_worker_loses_its_lock_after_one_lease(celery_setup, tasks, results):
    """SIGKILL of the whole node in mid-run: the message comes back, and its lock does not stop it for good."""
    result = tasks.locked.delay("a")
    wait_until(lambda: results.get("a:starts") == b"1", 30, celery_setup.worker.logs)
    celery_setup.worker.kill()
    results.set("a:go", 1)
    celery_setup.worker.restart()
    assert result.get(timeout=60 + LEASE) == "done"
    assert results.get("a:starts") == b"2"
    assert results.get("a:ends") == b"1"
