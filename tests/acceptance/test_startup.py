"""What a worker says when it starts: wrong settings end it, doubtful ones are told once, and no password is told at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import AppEnvironment, wait_until

TASKS = "tests.services.chaos_tasks"
ROOT = Path(__file__).parents[2]


def findings(worker):
    return [line for line in worker.log(whole=True).splitlines() if "celery_guard: " in line]


def said(worker, *words):
    wait_until(lambda: any(all(word in line for word in words) for line in findings(worker)), 30, lambda: f"{words} in {findings(worker)}")


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"guard_store_backend": None}, ["guard_store_backend is missing", "redis://localhost"]),
        ({"guard_lese": 30}, ["unknown setting guard_lese", "did you mean guard_lease?"]),
        ({"guard_lease": 1, "guard_on_store_error": "rise"}, ["guard_lease=1", "at least 3", "did you mean 'raise'?"]),
    ],
    ids=["no store", "misspelt", "two wrong values"],
)
def test_wrong_settings_end_the_worker(redis_url, worker_factory, conf, words):
    """Not the first task but the start fails, with all that is wrong and what to write instead."""
    worker = worker_factory(TASKS, environment=AppEnvironment(redis_url, conf=conf), wait=False)
    assert worker.wait(60) != 0
    log = worker.log(whole=True)
    assert [word for word in words if word not in log] == []
    assert " ready." not in log


@pytest.mark.smoke
def test_doubtful_surroundings_are_told(redis_url, private_redis, worker_factory):
    """An evicting store, a visibility timeout below the time limit, and late acknowledgement without requeueing."""
    store = private_redis("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    conf = {"guard_store_backend": store.url(0), "task_time_limit": 600, "task_reject_on_worker_lost": False}
    worker = worker_factory(TASKS, environment=AppEnvironment(redis_url, conf=conf))
    said(worker, "evicts keys", "allkeys-lru", "noeviction")
    said(worker, "may run for 600 s", "visibility_timeout")
    said(worker, "acks_late but not reject_on_worker_lost", "task_reject_on_worker_lost=True")


def test_nothing_is_said_where_all_is_well(redis_url, worker_factory):
    """No finding on a plain server with consistent settings; ``guard_startup_checks=False`` asks for none."""
    good = worker_factory(TASKS, environment=AppEnvironment(redis_url, conf={"guard_lease": 30}))
    silent = worker_factory(TASKS, environment=AppEnvironment(redis_url, conf={"guard_lease": 3, "guard_startup_checks": False}))
    for worker in (good, silent):
        wait_until(lambda worker=worker: "Connected to" in worker.log(whole=True), 30, "connected")
        assert findings(worker) == []


def test_a_store_that_is_down_does_not_keep_a_worker_from_starting(redis_url, private_redis, worker_factory):
    """It is told, and the worker waits for the store like its tasks do."""
    store = private_redis()
    store.kill()
    worker = worker_factory(TASKS, environment=AppEnvironment(redis_url, conf={"guard_store_backend": store.url(0), "guard_store_connect_timeout": 0.5}))
    said(worker, "could not be checked")
    assert worker.running


def test_no_output_shows_a_password(redis_url, private_redis, worker_factory):
    """Neither the worker's log, nor ``celery report``, nor ``guard config``, nor the error of a wrong password."""
    store = private_redis()
    assert store.command("ACL", "SETUSER", "shop", "on", ">gehe@1m", "~*", "&*", "+@all").startswith("+OK")
    good = f"redis://shop:gehe%401m@127.0.0.1:{store.port}/0"
    wrong = f"redis://shop:falsch%407@127.0.0.1:{store.port}/0"
    worker = worker_factory(TASKS, environment=AppEnvironment(redis_url, conf={"guard_store_backend": wrong, "guard_sweep_interval": 1.0}))
    said(worker, "could not be checked", "refused the login")
    assert "falsch" not in worker.log(whole=True)
    environment = AppEnvironment(redis_url, conf={"guard_store_backend": good})
    for words in (["report"], ["guard", "config"], ["guard", "config", "--json"], ["guard", "locks", "list"]):
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", TASKS, *words],
            cwd=ROOT,
            env={**_plain_environment(), **environment.variables()},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "gehe" not in done.stdout + done.stderr, words
        if words[-1] == "--json":
            assert json.loads(done.stdout)


def _plain_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("CELERY_GUARD_TEST_")}
