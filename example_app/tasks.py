"""The webshop's work, each job twice: as a plain Celery task and as a guarded one with the very same body.

The bodies only take their time and leave a trace; what differs is the line above them.
"""

from __future__ import annotations

import time
from typing import Any

from celery_guard import Backoff, GuardedTask, Unique, WithoutOverlapping
from example_app import ledger
from example_app.celery_app import app

#: Looking again soon suits a demo; with slots that are held for seconds, the default is kinder to the broker.
SOON = Backoff([0.3, 0.6, 1.0], jitter=0.3)


def work(task: Any, key: str, seconds: float, **details: Any) -> str:
    """Work on ``key`` for ``seconds``."""
    with ledger.run(task, key, seconds, **details):
        time.sleep(seconds)
    return key


# A product changes often, its summary is rebuilt once for all changes that wait.


@app.task(bind=True)
def plain_rebuild_summary(self: Any, product_id: int) -> str:
    """As often as it is dispatched."""
    return work(self, f"product:{product_id}", 0.3)


@app.task(bind=True, base=GuardedTask, unique=Unique(key="product:{product_id}", ttl=600))
def rebuild_summary(self: Any, product_id: int) -> str:
    """Identical work is not queued twice: a second dispatch gets the result of the first."""
    return work(self, f"product:{product_id}", 0.3)


# A change of the catalogue that comes while the index is being built needs one more build, but no two at once.


@app.task(bind=True)
def plain_build_index(self: Any, index: str) -> str:
    """As often as it is dispatched, beside itself."""
    return work(self, f"index:{index}", 0.5)


@app.task(
    bind=True,
    base=GuardedTask,
    unique=Unique(key="index:{index}", until="executing"),
    without_overlapping=WithoutOverlapping("index:{index}", lease=3, delay=SOON),
)
def build_index(self: Any, index: str) -> str:
    """Unique only while it waits: the claim is free as soon as the body starts."""
    return work(self, f"index:{index}", 0.5)


# A tenant's stock is a read-modify-write: every sync has to run, but never two of one tenant at once.


@app.task(bind=True)
def plain_sync_stock(self: Any, tenant_id: int, delivery_id: int) -> str:
    """Whenever a process is free."""
    return work(self, f"tenant:{tenant_id}", 0.4, delivery_id=delivery_id)


@app.task(bind=True, base=GuardedTask, without_overlapping=WithoutOverlapping(key="tenant:{tenant_id}", lease=3, delay=SOON))
def sync_stock(self: Any, tenant_id: int, delivery_id: int) -> str:
    """An execution lock: a run that finds it taken is postponed, without spending a retry."""
    return work(self, f"tenant:{tenant_id}", 0.4, delivery_id=delivery_id)


# The same for a job of seconds, long enough to be killed in the middle.


@app.task(bind=True)
def plain_import_prices(self: Any, tenant_id: int, file_id: int) -> str:
    """Whenever a process is free."""
    return work(self, f"tenant:{tenant_id}", 2.0, file_id=file_id)


@app.task(bind=True, base=GuardedTask, without_overlapping=WithoutOverlapping(key="tenant:{tenant_id}", lease=3, delay=SOON))
def import_prices(self: Any, tenant_id: int, file_id: int) -> str:
    """The heartbeat keeps the lock for as long as the process lives, and no longer."""
    return work(self, f"tenant:{tenant_id}", 2.0, file_id=file_id)


# The warehouse's interface answers two callers at once and bans the third.


@app.task(bind=True)
def plain_call_warehouse(self: Any, warehouse: str, order_id: int) -> str:
    """As many at once as there are processes."""
    return work(self, f"warehouse:{warehouse}", 0.3, order_id=order_id)


@app.task(bind=True, base=GuardedTask, without_overlapping=WithoutOverlapping(key="warehouse:{warehouse}", limit=2, lease=3, delay=SOON))
def call_warehouse(self: Any, warehouse: str, order_id: int) -> str:
    """A lock with two slots."""
    return work(self, f"warehouse:{warehouse}", 0.3, order_id=order_id)


# A shop's webhook is told of each event once, although it is dispatched twice, and of one event at a time.


@app.task(bind=True)
def plain_deliver_webhook(self: Any, endpoint: str, event_id: int) -> str:
    """Each dispatch is a delivery."""
    return work(self, f"endpoint:{endpoint}", 0.2, event_id=event_id)


@app.task(
    bind=True,
    base=GuardedTask,
    unique=Unique(key=("endpoint", "event_id")),
    without_overlapping=WithoutOverlapping(key="endpoint:{endpoint}", lease=3, delay=SOON),
)
def deliver_webhook(self: Any, endpoint: str, event_id: int) -> str:
    """Both guards on one task."""
    return work(self, f"endpoint:{endpoint}", 0.2, event_id=event_id)
