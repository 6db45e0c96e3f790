"""The webshop's Celery app.

Environment:
    EXAMPLE_REDIS_URL: Server without a database number; the default is ``redis://localhost:6379``. Broker, results and
        locks get databases 0, 1 and 2 of it.
    EXAMPLE_VISIBILITY_TIMEOUT: Whole seconds until the broker delivers the messages of a dead worker again; unset leaves
        Celery's own (an hour). It has to be longer than the longest task.
    EXAMPLE_LOG: File that tasks and dispatches leave a trace in (see ``example_app.ledger``); unset: none.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import after_task_publish

from example_app import ledger

__all__ = ["app"]

server = os.environ.get("EXAMPLE_REDIS_URL", "redis://localhost:6379").rstrip("/")

app = Celery("example_app", broker=f"{server}/0", backend=f"{server}/1", include=["example_app.tasks"], set_as_current=False)
app.conf.update(
    guard_store_backend=f"{server}/2",
    guard_lease=3,
    # A job whose process is killed is delivered again, with guards or without.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    result_expires=3600,
)
if visibility_timeout := os.environ.get("EXAMPLE_VISIBILITY_TIMEOUT"):
    app.conf.broker_transport_options = {
        "visibility_timeout": int(visibility_timeout),
        # kombu looks for messages of dead workers only every 100 seconds by default, and a worker that is
        # killed while it looks keeps the others from it for 300.
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 5,
    }


@after_task_publish.connect(weak=False, dispatch_uid="example_app.sent")
def _sent(sender: str | None = None, headers: Any = None, **_: Any) -> None:
    """Trace every message that the broker took, whichever process sent it."""
    if sender is not None and sender.startswith("example_app."):
        ledger.record("sent", task=sender, id=(headers or {}).get("id"))
