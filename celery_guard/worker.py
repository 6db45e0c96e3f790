"""The worker's main process: requests that give back what a dead child held, and the worker step.

Nothing here blocks the event loop: calls to the store go through the guard's backlog thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from celery import bootsteps
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request

from celery_guard.decisions import ClaimAction, EndRequest
from celery_guard.dispatch import header_of_request, new_token
from celery_guard.errors import GuardError, StoreUnavailable
from celery_guard.findings import startup_findings
from celery_guard.guard import FLUSH_TIMEOUT, Guard
from celery_guard.policies.header import HEADER, GuardHeader

__all__ = ["GuardStep", "GuardedRequest"]

logger = logging.getLogger("celery_guard")


class GuardedRequest(Request):
    """A request whose execution token is known to parent and child.

    The parent gives back slot and claim wherever the child cannot: it was killed, ran into a hard
    time limit or was terminated, or the task was revoked or expired before it began. Every path may
    come more than once (Celery 5.7 reports a hard time limit twice); ``end`` is idempotent.
    """

    #: The task; only guarded ones name this class as their Request.
    task: Any
    _context: Any
    _already_cancelled: bool

    def __init__(self, message: Any, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self._guard_header = self._prepare()
        self._guard_requeued = False
        self._guard_retried = False

    def _prepare(self) -> GuardHeader | None:
        if not self.task.guard_options:
            return None
        header = GuardHeader.from_dict(self.request_dict.get(HEADER))
        if header is None or header.task_id != str(self.id) or (header.lock is None and self.task.guard_options.without_overlapping is not None):
            try:
                header = header_of_request(self.task, self._context)
            except GuardError:
                return None  # the child derives the key again and reports the error as the task's failure
            # It was cached before the header was put in; the child's death is reported with it.
            self.__dict__.pop("_context", None)
        header = replace(header, token=new_token(), received=time.monotonic(), content_type=self.content_type)
        # A new dict: the message's own headers go back to the broker if it is requeued.
        self.request_dict[HEADER] = header.to_dict(local=True)
        return header

    # What tells how a request ended.

    def reject(self, requeue: bool = False) -> None:
        if requeue and not self.acknowledged:
            self._guard_requeued = True
        super().reject(requeue=requeue)

    def _retry_worker_lost(self, exc: Any, exc_info: Any) -> bool:
        retried: bool = super()._retry_worker_lost(exc, exc_info)  # type: ignore[misc]
        self._guard_retried = retried
        return retried

    # The ends that the child does not see.

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        exc = getattr(exc_info.exception, "exc", None) or exc_info.exception
        try:
            super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        finally:
            # An exception of the body was ended by the child, with its result in hand.
            if not return_ok and not isinstance(exc, Retry | Ignore | Reject) and not self._already_cancelled:
                self._give_back(crashed=True)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        try:
            super().on_timeout(soft, timeout)
        finally:
            if not soft:
                self._give_back(crashed=self._guard_requeued)

    def _announce_revoked(self, reason: Any, terminated: Any, signum: Any, expired: Any) -> None:
        try:
            super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]
        finally:
            self._give_back()

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._announce_cancelled(*args, **kwargs)  # type: ignore[misc]
        finally:
            # With late acknowledgement the message was never acknowledged: the broker delivers it again.
            self._guard_requeued = self._guard_requeued or bool(self.task.acks_late)
            self._give_back()

    def _give_back(self, *, crashed: bool = False) -> None:
        header = self._guard_header
        if header is None or (header.claim is None and header.lock is None):
            return
        if self._guard_retried:
            action = ClaimAction.KEEP
        elif self._guard_requeued:
            action = ClaimAction.REQUEUE
        else:
            action = ClaimAction.RELEASE
        request = EndRequest(
            owner=header.owner,
            token=header.token,
            generation=header.generation,
            claim=header.claim,
            until=header.until,
            claim_action=action,
            task_id=header.task_id,
            claim_ttl=header.ttl,
            lock=header.lock,
            crashed=crashed and action is ClaimAction.REQUEUE,
        )
        guard, task, task_id = Guard(self.task.app), self.task, self.id

        def give_back() -> None:
            result = guard.store.end(request)
            if result.slot_released or result.claim_released:
                guard.announce("lock_released", task, task_id=task_id, key=header.claim or header.lock, lock=header.lock, reason="on behalf")

        guard.backlog.put(give_back)


def _foreign_requests(guard: Guard) -> Iterator[str]:
    for name, task in sorted(guard.app.tasks.items()):
        if getattr(task, "guard_options", None) and not issubclass(symbol_by_name(task.Request), GuardedRequest):
            yield (
                f"task {name!r} has a Request class of its own, so what a killed child held is free only when its lease ends; "
                "derive that class from celery_guard.worker.GuardedRequest"
            )


class GuardStep(bootsteps.StartStopStep):
    """Checks settings and server once when a worker starts, sweeps, and empties the backlog at its end."""

    requires = ("celery.worker.components:Pool",)
    label = "guard"

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def include_if(self, parent: Any) -> bool:
        return any(getattr(task, "guard_options", None) for task in parent.app.tasks.values())

    def start(self, parent: Any) -> None:
        guard = Guard(parent.app)
        settings = guard.settings  # a wrong setting ends the worker here, not the first task
        self._stopped.clear()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._loop, args=(guard, settings.sweep_interval), name="celery_guard-sweeper", daemon=True)
            self._thread.start()

    def _loop(self, guard: Guard, interval: float) -> None:
        if guard.settings.startup_checks:
            for finding in (*startup_findings(guard), *_foreign_requests(guard)):
                logger.warning("celery_guard: %s", finding)
        while not self._stopped.wait(interval):
            try:
                guard.store.sweep()
            except StoreUnavailable as exc:
                logger.warning("celery_guard: sweep failed, trying again: %s", exc)
            except Exception:
                logger.exception("celery_guard: sweep failed")

    def stop(self, parent: Any) -> None:
        self._stopped.set()
        Guard(parent.app).backlog.flush(FLUSH_TIMEOUT)

    terminate = stop
