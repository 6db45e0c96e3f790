"""Execution of one delivery: begin, body, end, and every way of not running now.

All decisions come from ``policies``; this module turns them into Celery's terms. How a delivery
ends in each case, and what becomes of its message:

- run: the body's own outcome;
- postponed: the same message again with a countdown, this delivery is a ``Retry`` that spends none;
- copy of a running message: the same, but it leaves no state behind;
- copy of a finished or superseded message: ignored;
- skipped: REVOKED is stored, so that nobody waits for ever;
- refused, given up, poison: an ordinary failure.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError

from celery_guard.decisions import BeginOutcome, BeginRequest, BeginResult, ClaimAction, EndRequest
from celery_guard.dispatch import header_of_request, new_token
from celery_guard.errors import DuplicateTask, LockLost, OverlapRefused, PoisonTask, PostponedTooLong, StoreUnavailable
from celery_guard.guard import Guard
from celery_guard.options import Backoff
from celery_guard.policies.backoff import delay_for
from celery_guard.policies.header import HEADER
from celery_guard.policies.overlap import COPY_DELAYS, PREDECESSOR_DELAYS, STORE_DELAYS, GiveUp, Postpone, Refusal, Skip, capped, on_busy
from celery_guard.policies.unique import Conflict, resolve_conflict
from celery_guard.resend import ignores_result, resend
from celery_guard.run import Run
from celery_guard.stores.protocols import GuardStore

if TYPE_CHECKING:
    from celery_guard.task import GuardedTask

__all__ = ["Execution"]

logger = logging.getLogger("celery_guard")


class Execution:
    """One delivery of a guarded task, from begin to end."""

    def __init__(self, task: GuardedTask, guard: Guard, request: Any) -> None:
        self.task = task
        self.guard = guard
        self.request = request
        self.eager = bool(request.is_eager)
        header = header_of_request(task, request)
        self.header = header
        token = header.token or new_token()
        worker = f"{request.hostname or ''}:{os.getpid()}"
        self.run = Run(task, guard, header, token=token, attempt=(request.retries or 0) + 1, worker=worker, started=time.monotonic())
        self._pid = os.getpid()
        self._chance = guard.random.random()
        self._action, self._crashed, self._ended = ClaimAction.KEEP, False, False  # how it ends if begin is interrupted

    @property
    def store(self) -> GuardStore:
        return self.guard.eager_store if self.eager else self.guard.store

    def __call__(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the body under guard, or raise what ends this delivery.

        Args:
            body: What to run, ``task.run`` or what the task's classes put around it.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            Retry: It was postponed.
            Ignore: It is not to run: a copy, or skipped.
            GuardError: It was refused for good.
        """
        guarded = self.begin()
        try:
            return self._run(body, args, kwargs, guarded)
        except BaseException:
            if not self._ended:
                self._abandon()
            raise

    def _run(self, body: Callable[..., Any], args: Any, kwargs: Any, guarded: bool) -> Any:
        self._action = ClaimAction.RELEASE
        self.request.guard_run = self.run
        # A retry carries the header on; a message that came without one has it from here.
        self.request.headers = {**(self.request.headers or {}), HEADER: self.header.to_dict()}
        try:
            if guarded and not self.eager:
                self.guard.heartbeat.add(self.run)
            try:
                self.run.enter_body()
                return body(*args, **kwargs)
            finally:
                self.run.leave_body()
        except LockLost as exc:
            if not exc.message:  # raised into the body by the heartbeat, which can only name the class
                raise self.run.lock_lost() from None
            raise
        except Reject as exc:
            # A message that was acknowledged before its run does not come back.
            if exc.requeue and self.task.acks_late:  # type: ignore[attr-defined]
                self._action = ClaimAction.REQUEUE
            raise
        except Exception:
            raise
        except BaseException:
            # The process is going down: the main process sees why, and settles claim and crash count (GuardedRequest).
            self._action, self._crashed = ClaimAction.KEEP, True
            raise
        finally:
            self._end()

    def _end(self) -> None:
        if self.run.successor:
            self._action = ClaimAction.KEEP
        if not self.eager:
            self.guard.heartbeat.remove(self.run)
        self.end(self._action, crashed=self._crashed)

    def _abandon(self) -> None:
        """Give everything back from another thread: an exception from outside (soft time limit, abort) struck begin or end."""
        if os.getpid() != self._pid:
            return
        request = self._end_request(ClaimAction.KEEP if self.run.successor else self._action, crashed=self._crashed)
        if self.eager:
            self.store.end(request)
            return
        self.guard.heartbeat.remove(self.run)
        self.guard.backlog.put(lambda: self.guard.store.end(request))

    # ------------------------------------------------------------------------------- begin

    def begin(self) -> bool:
        """Ask to run; True if granted, False if the settings let it run without the store."""
        refusal = self._refusal_when_busy(0.0)  # only for its delay: how long the message has waited, the store's clock tells
        delay = refusal.delay if isinstance(refusal, Postpone) else 0.0
        request = self._begin_request(delay)
        try:
            result = self.store.begin(request)
        except StoreUnavailable as exc:
            return self._without_store(exc)
        except BaseException:
            self._abandon()  # interrupted while it waited for the answer, which may be a grant
            raise
        if result.outcome is BeginOutcome.RUN:
            self._granted(result)
            return True
        if result.outcome is BeginOutcome.DUPLICATE:
            return self._duplicate(result)
        self._not_now(result)
        raise AssertionError(f"unhandled outcome {result.outcome}")

    def _begin_request(self, delay: float) -> BeginRequest:
        header, run, settings = self.header, self.run, self.guard.settings
        return BeginRequest(
            owner=run.owner,
            token=run.token,
            generation=header.generation,
            task_id=run.task_id,
            worker=run.worker,
            lease=run.lease,
            claim=header.claim,
            until=header.until,
            claim_ttl=header.ttl + delay,
            contender=header.contender,
            lock=run.lock,
            limit=run.limit,
            max_crashes=settings.max_crashes if run.crash_memory else None,
            crash_memory=run.crash_memory or settings.crash_memory,
        )

    def _granted(self, result: BeginResult) -> None:
        self.run.fence = result.fence
        fields: dict[str, Any] = {"task_id": self.run.task_id, "key": self.run.claim or self.run.lock, "lock": self.run.lock}
        if result.claim_lost:
            self.guard.announce("claim_expired_before_start", self.task, level=logging.WARNING, **fields)
        if self.run.lock is not None:
            fields |= {"fence": result.fence, "attempt": self.header.postponed, "waited": round(self._waited(time.time()), 3)}
            self.guard.announce("lock_acquired", self.task, level=logging.DEBUG, **fields)

    def _refusal_when_busy(self, waited: float) -> Refusal:
        if self.run.overlap is None:
            return Postpone(0.0)
        return on_busy(self.run.overlap, postponed=self.header.postponed, waited=waited, u=self._chance, ceiling=self._ceiling())

    def _waited(self, now: float | None) -> float:
        return max(0.0, now - self.header.postponed_at) if now is not None and self.header.postponed_at is not None else 0.0

    def _ceiling(self) -> float | None:
        """A delayed message that outlives the visibility timeout is delivered twice: stay below it."""
        timeout = self.guard.visibility_timeout
        return None if timeout is None else timeout / 2

    def _without_store(self, exc: StoreUnavailable) -> bool:
        if exc.uncertain:
            # It may have been granted all the same: nobody is going to use that slot.
            request = self._end_request(ClaimAction.REQUEUE)
            self.guard.backlog.put(lambda: self.guard.store.end(request))
        if self.guard.settings.on_store_error_at_execution == "run":
            logger.warning("%s[%s] runs without guard: %s", self.task.name, self.run.task_id, exc)
            return False
        logger.warning("%s[%s] is postponed: %s", self.task.name, self.run.task_id, exc)
        self._postpone(self._delay(STORE_DELAYS), str(exc))
        raise AssertionError("unreachable")

    def _duplicate(self, result: BeginResult) -> bool:
        unique = self.task.guard_options.unique
        request = self.request
        continuation = bool(request.callbacks or request.errbacks or request.chord or request.group or request.chain is not None)
        decided = resolve_conflict(unique.on_conflict if unique is not None else "skip", continuation)
        fields: dict[str, Any] = {"task_id": self.run.task_id, "key": self.header.claim, "holder": result.holder_task_id, "state": str(result.holder_state)}
        try:
            if result.holder_task_id == self.run.task_id and self._adopt(str(self.header.claim)):
                return self.begin()
        except StoreUnavailable as exc:
            return self._without_store(exc)
        if decided is Conflict.RUN:
            self.guard.announce("duplicate_continues", self.task, **fields)
            self.header = replace(self.header, claim=None, contender=False)
            self.run.header, self.run.claim = self.header, None
            return self.begin()
        self.guard.announce("deduplicated", self.task, **fields)
        if decided is Conflict.RAISE:
            raise DuplicateTask(
                f"{self.task.name}: {self.header.claim!r} is claimed by task {result.holder_task_id} ({result.holder_state})",
                task=self.task.name,
                key=self.header.claim,
                task_id=result.holder_task_id,
                state=str(result.holder_state),
                age=None,
            )
        self._skip(f"duplicate of {result.holder_task_id}")
        raise AssertionError("unreachable")

    def _adopt(self, resource: str) -> bool:
        """Take over the claim in the way if it is this message's own: its header was lost on the way, the job must not be."""
        claim = self.store.get_claim(resource)
        if claim is None or claim.task_id != self.run.task_id:
            return False
        self.header = replace(self.header, owner=claim.owner, contender=False)
        self.run.header, self.run.owner = self.header, claim.owner
        return True

    def _not_now(self, result: BeginResult) -> None:
        fields: dict[str, Any] = {"task_id": self.run.task_id, "key": self.run.claim or self.run.lock, "lock": self.run.lock, "holder": result.holder_task_id}
        if result.outcome is BeginOutcome.BUSY:
            self._busy(result, fields)
        elif result.outcome is BeginOutcome.COPY_RUNNING:
            self.guard.announce("copy_postponed", self.task, **fields)
            self._postpone_copy(self._delay(COPY_DELAYS, result.retry_in))
        elif result.outcome in (BeginOutcome.COPY_FINISHED, BeginOutcome.STALE):
            self.guard.announce("copy_dropped", self.task, reason=str(result.outcome), **fields)
            raise Ignore
        elif result.outcome is BeginOutcome.PREDECESSOR_RUNNING:
            self._postpone(self._delay(PREDECESSOR_DELAYS, result.retry_in), "the run before it has not ended yet")
        elif result.outcome is BeginOutcome.POISON:
            self._poison(result.crashes)

    def _busy(self, result: BeginResult, fields: dict[str, Any]) -> None:
        refusal = self._refusal_when_busy(self._waited(result.now_at))
        if isinstance(refusal, Postpone) and not self.eager:
            self.guard.announce("postponed_overlap", self.task, delay=round(refusal.delay, 3), attempt=self.header.postponed + 1, **fields)
            self._postpone(refusal.delay, f"lock {self.run.lock!r} is held by task {result.holder_task_id}", result.now_at)
        if isinstance(refusal, GiveUp):
            self._release_claim()
            raise PostponedTooLong(
                f"{self.task.name}[{self.run.task_id}]: lock {self.run.lock!r} stayed busy for {refusal.waited:.0f} s; "
                "raise give_up_after or limit, or look at the holder with 'guard locks show'",
                task=self.task.name,
                key=self.run.lock,
                postponed=self.header.postponed,
                waited=refusal.waited,
            )
        if isinstance(refusal, Skip):
            self.guard.announce("superseded", self.task, reason="overlap", **fields)
            self._release_claim()
            self._skip(f"lock {self.run.lock} is held by task {result.holder_task_id}")
        self._release_claim()
        raise OverlapRefused(
            f"{self.task.name}[{self.run.task_id}]: lock {self.run.lock!r} is held by task {result.holder_task_id}",
            task=self.task.name,
            key=self.run.lock,
            task_id=result.holder_task_id,
            limit=self.run.limit,
        )

    def _poison(self, crashes: int) -> None:
        self._release_claim()
        raise PoisonTask(
            f"{self.task.name}[{self.run.task_id}] took its worker down {crashes} times and is not run again; "
            "find out why (memory? a native library?), then dispatch it anew",
            task=self.task.name,
            task_id=self.run.task_id,
            crashes=crashes,
        )

    # ------------------------------------------------------------------------------- not now

    def _delay(self, stages: Backoff, retry_in: float | None = None) -> float:
        delay = delay_for(stages, self.header.postponed, self.guard.random.random())
        if retry_in is not None:
            delay = min(delay, retry_in + 0.1)
        return capped(delay, self._ceiling())

    def _postpone(self, delay: float, reason: str, busy_at: float | None = None) -> None:
        """Send the same message again with a countdown and end this delivery; no retry is spent."""
        try:
            resend(self.task, self.request, self.header.postponement(time.time(), busy_at), delay)
        except Exception as exc:
            if self.task.acks_late:
                raise Reject(exc, requeue=True) from exc
            self._release_claim()
            raise
        raise Retry(message=f"postponed: {reason}", when=delay)  # type: ignore[arg-type]

    def _postpone_copy(self, delay: float) -> None:
        """Send a copy of a running message again; it leaves no state, and no trace if that fails."""
        try:
            resend(self.task, self.request, self.header.copy(time.time()), delay)
        except Exception as exc:
            if self.task.acks_late:
                raise Reject(exc, requeue=True) from exc
            # Acknowledged already, and only needed if the run beside it dies.
            logger.exception("%s[%s]: a copy of this running message is lost", self.task.name, self.run.task_id)
        raise Ignore

    def _skip(self, reason: str) -> None:
        """End as revoked: whoever waits is told, a chord or chain it belongs to fails clearly."""
        if self.eager:
            raise Ignore
        request = self.request
        error = TaskRevokedError(reason)
        self.task.backend.mark_as_failure(
            request.id, error, request=request, store_result=not ignores_result(self.task, request), call_errbacks=False, state=states.REVOKED
        )
        raise Ignore

    def _release_claim(self) -> None:
        if self.header.claim is not None and self.header.until != "expired":
            if self.eager:
                self.store.release_claim(self.header.claim, self.run.owner)
            else:
                self.guard.release_now(self.header.claim, self.run.owner)

    # ------------------------------------------------------------------------------- end

    def end(self, action: ClaimAction, *, crashed: bool = False) -> None:
        """Give everything back. A store that is away ends it by the lease; never an error of the task."""
        if os.getpid() != self._pid:
            return  # the body forked: this run belongs to the parent
        run, request = self.run, self._end_request(action, crashed=crashed)
        try:
            result = self.store.end(request)
            self._ended = True
        except StoreUnavailable as exc:
            self._ended = True
            logger.warning("%s[%s]: locks are not given back, they end with their lease: %s", self.task.name, run.task_id, exc)
            if not self.eager:
                self.guard.backlog.put(lambda: self.guard.store.end(request))
            return
        if run.lock is not None:
            if result.slot_released:
                fields: dict[str, Any] = {"task_id": run.task_id, "key": run.claim or run.lock, "lock": run.lock}
                self.guard.announce("lock_released", self.task, level=logging.DEBUG, duration=round(time.monotonic() - run.started, 3), **fields)
            else:
                run.on_lost("expired")

    def _end_request(self, action: ClaimAction, *, crashed: bool = False) -> EndRequest:
        run, header = self.run, self.header
        redelivered = bool((self.request.delivery_info or {}).get("redelivered"))
        overdue = run.unacknowledged_for() > (self.guard.visibility_timeout or float("inf"))
        return EndRequest(
            owner=run.owner,
            token=run.token,
            generation=header.generation,
            claim=header.claim,
            until=header.until,
            claim_action=action,
            task_id=run.task_id,
            claim_ttl=header.ttl,
            lock=run.lock,
            crashed=crashed,
            finished_ttl=self.guard.settings.finished_ttl,
            copies_expected=redelivered or overdue or self._may_have_a_past(),
        )

    def _may_have_a_past(self) -> bool:
        """Whether the message that this one followed may come again: its worker may have died between sending this one and acknowledging it."""
        return self.header.generation > 0 and bool(self.task.acks_late)
