"""The app of the benchmarks; its servers come from the environment."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_guard import GuardedTask, Unique, WithoutOverlapping

__all__ = ["STORE_DB", "app", "make_app"]

STORE_DB = 2


def make_app(redis: str, broker: str | None = None) -> Celery:
    """Make an app with the tasks ``plain``, ``unique``, ``unique_all``, ``locked`` and ``both``.

    Args:
        redis: Redis URL without database.
        broker: Broker URL; None: a database of that server.
    """
    made: Celery = Celery("bench", broker=broker or f"{redis}/0", set_as_current=False)
    made.conf.update(guard_store_backend=f"{redis}/{STORE_DB}", task_ignore_result=True, broker_connection_retry_on_startup=True)

    def nothing(number: int) -> None:
        """Do nothing."""

    lock = WithoutOverlapping(key="number:{number}")
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "unique": {"base": GuardedTask, "unique": Unique(key="number:{number}")},
        "unique_all": {"base": GuardedTask, "unique": True},
        "locked": {"base": GuardedTask, "without_overlapping": lock},
        "both": {"base": GuardedTask, "unique": Unique(key="number:{number}"), "without_overlapping": lock},
    }
    for name, given in options.items():
        made.task(name=name, shared=False, **given)(nothing)  # type: ignore[no-untyped-call]
    return made


app = make_app(os.environ.get("BENCH_REDIS", "redis://localhost:6379"))
