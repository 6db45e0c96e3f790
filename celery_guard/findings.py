"""Start-up checks: settings and servers that would break the promise, told once and by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery_guard.compat import version_warnings
from celery_guard.decisions import ServerFacts
from celery_guard.errors import StoreUnavailable
from celery_guard.guard import Guard

__all__ = ["server_findings", "startup_findings", "task_findings"]

MINIMUM_REDIS = (6, 2)


def startup_findings(guard: Guard) -> Iterator[str]:
    """Everything that is worth a warning when a worker starts, one sentence each."""
    yield from version_warnings()
    yield from guard.settings.warnings()
    try:
        yield from server_findings(guard.store.facts())
    except StoreUnavailable as exc:
        yield f"the lock store could not be checked: {exc}"
    for task in sorted(guard.app.tasks.values(), key=lambda task: str(task.name)):
        if getattr(task, "guard_options", None):
            yield from task_findings(guard, task)


def server_findings(facts: ServerFacts) -> Iterator[str]:
    """What is wrong with the lock store's server. What it does not tell is not held against it."""
    if facts.kind == "memory":
        return
    version = _version(facts.version)
    if version is not None and version < MINIMUM_REDIS:
        yield f"the lock store runs {facts.kind} {facts.version}; at least Redis 6.2 is needed"
    policy = facts.maxmemory_policy
    if policy is not None and policy != "noeviction":
        risk = "locks vanish without notice when memory runs short" if facts.maxmemory else "locks would vanish without notice once maxmemory is set"
        yield f"the lock store evicts keys (maxmemory-policy {policy}): {risk}; use a server with maxmemory-policy noeviction"


def task_findings(guard: Guard, task: Any) -> Iterator[str]:
    """What is contradictory between a task's options and the app's settings."""
    options = task.guard_options
    if task.acks_late and not (task.reject_on_worker_lost or getattr(task, "retry_on_worker_lost", None)):
        yield (
            f"task {task.name!r} has acks_late but not reject_on_worker_lost: "
            "Celery acknowledges it when its process is killed, and the job is lost; set task_reject_on_worker_lost=True"
        )
    timeout = guard.visibility_timeout
    conf = guard.app.conf  # older Celery (5.4) leaves the settings to the worker: the task does not know them
    limit = task.time_limit or conf.task_time_limit or task.soft_time_limit or conf.task_soft_time_limit
    if timeout is not None and task.acks_late and limit and limit > timeout:
        yield (
            f"task {task.name!r} may run for {limit:g} s, but the broker delivers it again after {timeout:g} s; "
            "raise visibility_timeout in broker_transport_options above the time limit"
        )
    overlap = options.without_overlapping
    if overlap is not None and overlap.max_hold_seconds is not None and limit and overlap.max_hold_seconds < limit:
        yield (
            f"task {task.name!r} may run for {limit:g} s, but gives its lock up after max_hold={overlap.max_hold_seconds:g} s; "
            "raise max_hold or lower the time limit"
        )
    yield from options.warnings


def _version(text: str | None) -> tuple[int, ...] | None:
    if not text:
        return None
    parts = text.split(".")
    return tuple(int(part) for part in parts[:2]) if all(part.isdigit() for part in parts[:2]) else None
