"""Sending a delivery's message again, with a countdown and otherwise as it came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kombu.serialization import registry  # type: ignore[attr-defined]

from celery_guard.dispatch import PREPARED
from celery_guard.policies.header import HEADER, GuardHeader

if TYPE_CHECKING:
    from celery_guard.task import GuardedTask

__all__ = ["form_of", "ignores_result", "resend"]

#: A postponed message that the broker does not take is the job itself: try for about a minute.
PUBLISH_POLICY = {"max_retries": 20, "interval_start": 0.1, "interval_step": 0.3, "interval_max": 5.0}
#: Parts of a message that ``Context.as_execution_options`` leaves out (Celery 5.4 to 5.7): without
#: them it would show what its sender hid, and change its form.
LEFT_OUT = ("argsrepr", "kwargsrepr", "compression")


def resend(task: GuardedTask, request: Any, header: GuardHeader, delay: float) -> None:
    """Publish the message of ``request`` again: same id, retries, callbacks, queue, form.

    Args:
        task: The task.
        request: Celery's Context of the delivery.
        header: Guard header of the message to send.
        delay: Countdown in seconds.
    """
    options: dict[str, Any] = {
        "guard": PREPARED,
        "headers": {**(request.headers or {}), HEADER: header.to_dict()},
        "add_to_parent": False,
        "retry": True,
        "retry_policy": PUBLISH_POLICY,
    }
    task.signature_from_request(request, countdown=delay, retries=request.retries, **options).apply_async()


def form_of(task: GuardedTask, request: Any) -> dict[str, Any]:
    """The options of a dispatch that give its message the form of the delivery ``request``."""
    options = {name: getattr(request, name) for name in LEFT_OUT if getattr(request, name, None)}
    options["ignore_result"] = ignores_result(task, request)  # a retry of Celery 5.4 loses it
    header = GuardHeader.from_dict(getattr(request, HEADER, None))
    serializer = registry.type_to_name.get(header.content_type) if header is not None and header.content_type else None
    return options if serializer is None else {**options, "serializer": serializer}


def ignores_result(task: GuardedTask, request: Any) -> bool:
    """Whether nobody wants the result of ``request``.

    Context has a class-level False, which must not pass for the sender's wish (``celery/app/task.py``,
    Celery 5.4 to 5.7).
    """
    wish = vars(request).get("ignore_result")
    return bool(task.ignore_result if wish is None else wish)
