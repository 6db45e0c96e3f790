"""Apps without services, and deliveries without a worker: the seams between Celery and the guard, one call at a time.

Broker, results and store are in the memory of this process. What is dispatched is caught on its way
out, and ``deliver`` hands it to Celery's own tracer, as the pool of a worker does.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from celery import Celery, signals
from celery.app import trace

from celery_guard import Guard
from celery_guard.worker import GuardedRequest


def memory_app(name: str = "seams", **conf: Any) -> Any:
    """Make an app that needs no service."""
    app = Celery(name, broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        {"guard_store_backend": "memory", "guard_lease": 3, "task_default_queue": uuid.uuid4().hex, "broker_connection_retry_on_startup": True, **conf}
    )
    return app


@dataclass
class Sent:
    """One message as it left."""

    task: str
    headers: dict[str, Any]
    body: Any

    @property
    def id(self) -> Any:
        return self.headers["id"]

    @property
    def guard(self) -> dict[str, Any]:
        header: dict[str, Any] = self.headers["guard"]
        return header


@contextmanager
def catching() -> Iterator[list[Sent]]:
    """Collect every message that is sent meanwhile."""
    caught: list[Sent] = []

    def catch(sender: Any = None, headers: Any = None, body: Any = None, **_: Any) -> None:
        caught.append(Sent(str(sender), dict(headers), body))

    signals.before_task_publish.connect(catch, weak=False)
    try:
        yield caught
    finally:
        signals.before_task_publish.disconnect(catch)


@dataclass
class Outcome:
    """How a delivery ended: Celery's state (None: success) and the value or exception."""

    state: str | None
    value: Any


@dataclass
class Message:
    """What a worker gets of one message."""

    headers: dict[str, Any]
    body: Any
    payload: Any = None
    content_type: str = "application/json"
    content_encoding: str = "utf-8"
    properties: dict[str, Any] = field(default_factory=dict)
    delivery_info: dict[str, Any] = field(default_factory=lambda: {"redelivered": False, "routing_key": "celery"})
    acknowledged: bool = False

    def ack_log_error(self, *_: Any) -> None:
        self.acknowledged = True

    def reject_log_error(self, *_: Any) -> None:
        self.acknowledged = True


def request_of(app: Any, sent: Sent) -> Any:
    """Make the request of the worker's main process."""
    task = app.tasks[sent.task]
    message = Message(dict(sent.headers), sent.body)
    return GuardedRequest(
        message,
        app=app,
        hostname="seams",
        on_ack=message.ack_log_error,
        on_reject=message.reject_log_error,
        task=task,
        body=sent.body,
        headers=message.headers,
        decoded=True,
    )


def deliver(app: Any, sent: Sent) -> Outcome:
    """Run a message through the worker's request and Celery's tracer."""
    request = request_of(app, sent)
    task = app.tasks[sent.task]
    args, kwargs, embed = sent.body
    context = {**request.request_dict, "delivery_info": {"redelivered": False}, "args": args, "kwargs": kwargs, "hostname": "seams", "is_eager": False, **embed}
    tracer = trace.build_tracer(task.name, task, app=app)
    outcome = tracer(request.id, args, kwargs, context)
    return Outcome(outcome.info.state if outcome.info else None, outcome.info.retval if outcome.info else outcome.retval)


def run(app: Any, task: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Dispatch a task and deliver its message."""
    with catching() as sent:
        task.delay(*args, **kwargs)
    return deliver(app, sent[0])


def held(app: Any) -> list[str]:
    """Resources that are claimed or locked."""
    store = Guard(app).store
    return [claim.resource for claim in store.list_claims()] + [lock.resource for lock in store.list_locks()]
