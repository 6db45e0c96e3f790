"""Signal receivers: messages that end without ever becoming a run.

Celery has no other hook for them. Connected when the first guarded task is bound.
"""

from __future__ import annotations

from typing import Any

from celery import signals

from celery_guard.decisions import EndRequest
from celery_guard.dispatch import header_of_request
from celery_guard.errors import ConfigurationError, KeyDerivationError
from celery_guard.guard import Guard, flush_backlogs
from celery_guard.policies.header import GuardHeader

__all__ = ["connect"]


def _release_message(consumer: Any, message: Any) -> None:
    header = GuardHeader.from_headers(getattr(message, "headers", None))
    if header is not None and header.claim is not None and header.until != "expired":
        # Without a token: a copy of a running message does not free what that run holds.
        Guard(consumer.app).end_later(EndRequest(header.owner, None, header.generation, header.claim, header.until))


def _on_unknown(sender: Any = None, message: Any = None, **_: Any) -> None:
    """A task that this worker does not know: Celery discards the message."""
    _release_message(sender, message)


def _on_rejected(sender: Any = None, message: Any = None, **_: Any) -> None:
    """A message that cannot be decoded, or is malformed: Celery discards it."""
    _release_message(sender, message)


def _on_ready(sender: Any = None, **_: Any) -> None:
    """A worker begins to consume: Celery has no signal for a message whose body cannot be read, only this method."""
    on_decode_error = sender.on_decode_error

    def release_and_discard(message: Any, exc: Exception) -> Any:
        _release_message(sender, message)
        return on_decode_error(message, exc)

    sender.on_decode_error = release_and_discard


def _on_failure(sender: Any = None, **_: Any) -> None:
    """A failure before the body began, for example in ``before_start``."""
    if not getattr(sender, "guard_options", None):
        return
    request = sender.request_stack.top
    # called_directly: the main process reports a lost child, GuardedRequest sees to that.
    if request is None or request.called_directly or request.is_eager or "guard_run" in vars(request):
        return
    try:
        header = header_of_request(sender, request)
    except (KeyDerivationError, ConfigurationError):
        return
    if header.claim is not None and header.until != "expired":
        # By token: a copy of a running message does not free what that run holds.
        Guard(sender.app).end_now(EndRequest(header.owner, header.token, header.generation, header.claim, header.until, claim_ttl=header.ttl))


def _on_process_shutdown(**_: Any) -> None:
    """A child of the pool ends: it leaves without what Python does at exit."""
    flush_backlogs()


def connect() -> None:
    """Connect the receivers; again is harmless."""
    signals.task_unknown.connect(_on_unknown, dispatch_uid="celery_guard.unknown", weak=False)
    signals.task_rejected.connect(_on_rejected, dispatch_uid="celery_guard.rejected", weak=False)
    signals.worker_ready.connect(_on_ready, dispatch_uid="celery_guard.ready", weak=False)
    signals.worker_process_shutdown.connect(_on_process_shutdown, dispatch_uid="celery_guard.shutdown", weak=False)
    signals.task_failure.connect(_on_failure, dispatch_uid="celery_guard.failure", weak=False)
