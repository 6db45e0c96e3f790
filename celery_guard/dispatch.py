"""Dispatch of a guarded task: claim, then publish, with a defined outcome for every path between.

The broker and the lock store are two systems. The paths:

- claimed, published: the claim waits for its message;
- claimed, publishing failed: the claim is released by its owner, the error is raised;
- claimed, fate of the message unknown (time-out, interrupt): the claim lives for
  ``guard_uncertain_ttl`` more, the error is raised;
- claimed, process killed before publishing: the claim ends with its ttl;
- claim refused or store away: nothing is published, unless the settings say so.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.utils import uuid
from celery.utils.time import maybe_iso8601
from kombu.exceptions import OperationalError

from celery_guard.decisions import ClaimOutcome, ClaimRequest, ClaimResult, ClaimState
from celery_guard.errors import DuplicateTask, LockLost, StoreUnavailable
from celery_guard.guard import Guard
from celery_guard.policies.header import HEADER, GuardHeader
from celery_guard.policies.unique import Conflict, carries_continuation, claim_ttl, resolve_conflict
from celery_guard.result import Conflict as ConflictInfo
from celery_guard.result import GuardedResult

if TYPE_CHECKING:
    from celery_guard.task import GuardedTask

__all__ = ["PREPARED", "Message", "dispatch", "header_of_request", "new_token"]

logger = logging.getLogger("celery_guard")

#: Value of the ``guard`` option of a message whose header and claim are in order already.
PREPARED = "prepared"
#: Exceptions that strike from outside, at any point of what is going on.
INTERRUPTS = (SoftTimeLimitExceeded, LockLost)


@dataclass(slots=True)
class Message:
    """A call of ``app.send_task``."""

    name: str
    args: Any
    kwargs: Any
    options: dict[str, Any]

    def send(self, guard: Guard, header: GuardHeader | None = None) -> Any:
        """Hand it to Celery, with ``header`` among its headers."""
        options = self.options
        if header is not None:
            # Headers may be absent, None or somebody's shared dict: never change theirs.
            options = {**options, "headers": {**(options.get("headers") or {}), HEADER: header.to_dict()}}
        return guard.send_task(self.name, self.args, self.kwargs, **options)


def new_token() -> str:
    """128 random bits, URL-safe."""
    return secrets.token_urlsafe(16)


def dispatch(task: GuardedTask, guard: Guard, message: Message) -> Any:
    """Send one message of ``task``, or do not.

    Args:
        task: The guarded task.
        guard: Its app's guard.
        message: What ``app.send_task`` was called with. Its option ``guard`` is False for a
            dispatch without a claim.

    Returns:
        The result: a GuardedResult, unless the caller asked for another class.

    Raises:
        KeyDerivationError: An argument has no canonical form; nothing was sent.
        DuplicateTask: The key is claimed, with ``on_conflict="raise"``; nothing was sent.
        StoreUnavailable: The claim could not be taken; nothing was sent.
    """
    how = message.options.pop("guard", None)
    if how == PREPARED or not task.guard_options:
        return message.send(guard)
    return _Dispatch(task, guard, message)(claimless=how is False)


def make_header(task: GuardedTask, task_id: str, args: Any, kwargs: Any, *, owner: str, now: float, claimless: bool = False) -> GuardHeader:
    """Derive the keys of one message.

    Raises:
        KeyDerivationError: If an argument has no canonical form.
    """
    unique = task.guard_options.unique
    return GuardHeader(
        owner=owner,
        task_id=task_id,
        published_at=now,
        claim=task.claim_key(args, kwargs) if unique is not None and not claimless else None,
        until=unique.until if unique is not None else "executed",
        ttl=unique.ttl_seconds if unique is not None else 3600.0,
        lock=task.lock_key(args, kwargs),
    )


def header_of_request(task: GuardedTask, request: Any) -> GuardHeader:
    """The header of a delivery; for a message that was sent without one it is derived here.

    Args:
        task: The guarded task.
        request: Celery's Context of the delivery.

    Raises:
        KeyDerivationError: If the message has no header and its arguments have no key.
    """
    header = GuardHeader.from_headers(request.headers) or GuardHeader.from_dict(getattr(request, HEADER, None))
    if header is not None and header.task_id == str(request.id):
        if header.lock is None and task.guard_options.without_overlapping is not None:
            # Sent before the task had a lock, by a process that was not updated yet.
            header = replace(header, lock=task.lock_key(request.args, request.kwargs))
        return header
    # The id makes the owner, so that copies of this message know each other.
    derived = make_header(task, str(request.id), request.args, request.kwargs, owner=f"task:{request.id}", now=0.0)
    return replace(derived, generation=request.retries or 0, contender=derived.claim is not None)


class _Dispatch:
    """One dispatch on its way between the store and the broker."""

    def __init__(self, task: GuardedTask, guard: Guard, message: Message) -> None:
        self.task = task
        self.guard = guard
        self.message = message
        self.options = options = message.options
        options["result_cls"] = options.get("result_cls") or task.AsyncResult
        given = options.get("task_id")
        self.has_own_id = not given
        self.task_id = str(given or uuid())  # Celery takes any object whose text will do, for example a UUID
        options["task_id"] = given or self.task_id

    def __call__(self, *, claimless: bool) -> Any:
        if not self.has_own_id and not claimless:
            carried = GuardHeader.from_headers(self.options.get("headers"))
            if carried is not None and carried.task_id == self.task_id:
                return self.succeed(carried)
        message = self.message
        header = make_header(self.task, self.task_id, message.args, message.kwargs, owner=new_token(), now=time.time(), claimless=claimless)
        if header.claim is None:
            return self.publish(header)
        run = None if self.has_own_id else self.task.current_run()
        if run is not None and run.task_id == self.task_id and run.claim == header.claim:
            # Task.replace() with a task of the same key: it takes over the id, so it takes over the claim.
            return self.succeed(replace(header, owner=run.owner, generation=run.header.generation))
        return self.claim(header, header.claim)

    def claim(self, header: GuardHeader, resource: str) -> Any:
        """Take the claim, and publish if it was free."""
        ttl = self.ttl(header)
        try:
            result = self.guard.store.claim(ClaimRequest(resource, header.owner, header.task_id, ttl))
        except StoreUnavailable as exc:
            if self.guard.settings.on_store_error != "dispatch":
                if exc.uncertain:
                    self.guard.release_later(resource, header.owner)
                raise
            logger.warning("%s[%s] is dispatched without a claim: %s", self.task.name, header.task_id, exc)
            return self.publish(header)
        except BaseException:
            # Struck from outside while it waited for the answer; nothing was sent.
            self.guard.release_later(resource, header.owner)
            raise
        if result.outcome is ClaimOutcome.HELD:
            return self.refuse(header, resource, result)
        published = self.publish(header)
        self.guard.announce("dispatched", self.task, level=logging.DEBUG, task_id=header.task_id, key=resource, ttl=ttl)
        return published

    def refuse(self, header: GuardHeader, resource: str, result: ClaimResult) -> Any:
        """Another message holds the claim: skip, raise, or go without one."""
        unique = self.task.guard_options.unique
        conflict = ConflictInfo(resource, result.holder_task_id or "", result.holder_state or ClaimState.QUEUED, result.holder_age or 0.0)
        decided = resolve_conflict(unique.on_conflict if unique is not None else "skip", carries_continuation(self.options))
        fields: dict[str, Any] = {"task_id": header.task_id, "key": resource}
        fields |= {"holder": conflict.task_id, "state": str(conflict.state), "age": round(conflict.age, 3)}
        if decided is Conflict.RUN:
            self.guard.announce("duplicate_continues", self.task, **fields)
            return self.publish(replace(header, claim=None))
        self.guard.announce("deduplicated", self.task, **fields)
        if decided is Conflict.RAISE:
            raise DuplicateTask(
                f"{self.task.name}: {resource!r} is claimed by task {conflict.task_id} ({conflict.state}, {conflict.age:.1f} s old); "
                "wait for it, or use on_conflict='skip' to get its result instead of this error",
                task=self.task.name,
                key=resource,
                task_id=conflict.task_id,
                state=str(conflict.state),
                age=conflict.age,
            )
        duplicate = GuardedResult(conflict.task_id, backend=self.task.backend, task_name=self.task.name, app=self.guard.app)
        return duplicate.as_duplicate(conflict, self.options.get("ignore_result"))

    def succeed(self, carried: GuardHeader) -> Any:
        """Send a message that has its owner already: a retry, a replacement, a replay. It goes through.

        The claim is renewed first, so that it is kept over the gap until the message is taken.
        """
        header = carried.successor(time.time())
        if header.claim is not None:
            try:
                self.guard.store.claim(ClaimRequest(header.claim, header.owner, header.task_id, self.ttl(header)))
            except StoreUnavailable as exc:
                # The retry matters more than its claim: begin takes the claim again if it is free.
                logger.warning("%s[%s] is sent on, its claim could not be renewed: %s", self.task.name, header.task_id, exc)
        run = self.task.current_run()
        if run is not None and run.owner != header.owner:
            run = None
        try:
            published = self.message.send(self.guard, header)
        except BaseException as exc:
            if run is not None and header.claim is not None and _fate_unknown(exc):
                run.successor = True  # if it is on its way, the claim is its own; if not, it ends soon
                self.guard.release_now(header.claim, header.owner, self.guard.settings.uncertain_ttl)
            raise
        if run is not None:
            run.successor = True
        return published

    def publish(self, header: GuardHeader) -> Any:
        """Send, and settle the claim if that fails."""
        try:
            return self.message.send(self.guard, header)
        except BaseException as exc:
            if header.claim is not None:
                self.guard.release_now(header.claim, header.owner, self.guard.settings.uncertain_ttl if _fate_unknown(exc) else None)
            raise

    def ttl(self, header: GuardHeader) -> float:
        """Seconds that the claim lives while this message waits."""
        options = self.options
        eta, countdown, expires = options.get("eta"), options.get("countdown"), options.get("expires")
        if eta is None and expires is None:
            return claim_ttl(header.ttl, float(countdown or 0.0), None)
        delay = float(countdown) if countdown else _seconds_until(eta)  # Celery's order, too
        return claim_ttl(header.ttl, delay, None if expires is None else _seconds_until(expires))


def _fate_unknown(exc: BaseException) -> bool:
    """Whether the broker may have got the message although publishing raised ``exc``."""
    if not isinstance(exc, Exception) or isinstance(exc, INTERRUPTS):
        return True
    seen: BaseException | None = exc
    while seen is not None:
        if isinstance(seen, TimeoutError):
            return True
        seen = seen.__cause__ or seen.__context__
    return isinstance(exc, OperationalError) and "timed out" in str(exc).lower()


def _seconds_until(value: Any) -> float:
    """Seconds until ``value``: a datetime, an ISO string, seconds already, or None for now.

    A naive one is in UTC whatever the app's zone, like in the worker (``celery/worker/request.py``,
    Celery 5.4 to 5.7).
    """
    if value is None:
        return 0.0
    if isinstance(value, int | float):
        return float(value)
    moment: datetime = maybe_iso8601(value)  # type: ignore[assignment]  # None only for None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return float((moment - datetime.now(UTC)).total_seconds())
