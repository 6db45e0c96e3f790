"""Tasks of the nodes. pytest-celery copies this file into the worker, so it imports nothing of the tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import redis
from celery import shared_task

from celery_guard import GuardedTask, Unique, WithoutOverlapping

LEASE = 3


def _hold(app: Any, name: str, limit: float = 60.0) -> str:
    """Count a start and an end under ``name`` in the result store; end when ``<name>:go`` is set there."""
    with redis.Redis.from_url(app.conf.result_backend) as client:
        client.incr(f"{name}:starts")
        client.set(f"{name}:pid", os.getpid())
        deadline = time.monotonic() + limit
        while not client.exists(f"{name}:go") and time.monotonic() < deadline:
            time.sleep(0.02)
        client.incr(f"{name}:ends")
    return "done"


def define(task: Callable[..., Any]) -> SimpleNamespace:
    """Define all tasks with a decorator: ``shared_task``, or the ``task`` of an app."""

    @task(name="nodes.pids")
    def pids() -> tuple[int, int]:
        """Pid of the process that runs the task and of its parent."""
        return os.getpid(), os.getppid()

    @task(name="nodes.hold", bind=True, acks_late=True, reject_on_worker_lost=True)
    def hold(self, name: str) -> str:
        return _hold(self.app, name)

    @task(name="nodes.unique", bind=True, base=GuardedTask, unique=Unique(key="{name}", ttl=60))
    def unique(self, name: str) -> str:
        return _hold(self.app, name)

    @task(name="nodes.locked", bind=True, base=GuardedTask, acks_late=True, without_overlapping=WithoutOverlapping(key="all", lease=LEASE))
    def locked(self, name: str) -> str:
        return _hold(self.app, name)

    return SimpleNamespace(pids=pids, hold=hold, unique=unique, locked=locked)


if os.environ.get("CELERY_GUARD_NODE"):  # in the worker; the tests define the tasks on the app of each test
    define(shared_task)
