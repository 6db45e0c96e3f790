"""The store in memory: for tests, eager tasks and one single process.

Holds to the same rules as the Redis store, under one lock and on an injected clock. It sees nothing
of other processes: with prefork workers it guards nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from celery_guard.decisions import (
    BeginOutcome,
    BeginRequest,
    BeginResult,
    ClaimAction,
    ClaimInfo,
    ClaimOutcome,
    ClaimRequest,
    ClaimResult,
    ClaimState,
    EndRequest,
    EndResult,
    ExtendOutcome,
    ExtendRequest,
    ExtendResult,
    LockInfo,
    ServerFacts,
)
from celery_guard.stores.memory_records import ClaimRecord, LockRecord, RunRecord

__all__ = ["MemoryStore"]

Info = TypeVar("Info", ClaimInfo, LockInfo)


class MemoryStore:
    """``GuardStore`` within one process.

    Args:
        clock: Returns epoch seconds.
        prefix: Shown in the address; two stores never share anything, whatever their prefix.
    """

    def __init__(self, clock: Callable[[], float] = time.time, prefix: str = "guard") -> None:
        self._clock = clock
        self._prefix = prefix
        self._mutex = threading.Lock()
        self._claims: dict[str, ClaimRecord] = {}
        self._locks: dict[str, LockRecord] = {}
        self._runs: dict[str, RunRecord] = {}

    @property
    def address(self) -> str:
        """The store for people and logs."""
        return f"memory://{self._prefix}"

    def close(self) -> None:
        """Do nothing: there is no connection, and what is held stays held."""

    # ------------------------------------------------------------------------------ claims

    def claim(self, request: ClaimRequest) -> ClaimResult:
        """See ``ClaimStore.claim``."""
        with self._mutex:
            now = self._clock()
            held = self._live_claim(request.resource, now)
            if held is None:
                self._claims[request.resource] = ClaimRecord(request.owner, request.task_id, ClaimState.QUEUED, now, now + request.ttl)
                return ClaimResult(ClaimOutcome.CLAIMED)
            if held.owner != request.owner:
                return ClaimResult(ClaimOutcome.HELD, held.task_id or None, held.state, now - held.since_at)
            self._claims[request.resource] = ClaimRecord(request.owner, request.task_id, ClaimState.QUEUED, held.since_at, now + request.ttl)
            return ClaimResult(ClaimOutcome.OWN)

    def release_claim(self, resource: str, owner: str, ttl: float | None = None) -> bool:
        """See ``ClaimStore.release_claim``."""
        with self._mutex:
            now = self._clock()
            held = self._live_claim(resource, now)
            if held is None or held.owner != owner:
                return False
            if ttl is None:
                del self._claims[resource]
            elif held.state is not ClaimState.RUNNING:
                held.expires_at = min(held.expires_at, now + ttl)
            return True

    def _live_claim(self, resource: str, now: float) -> ClaimRecord | None:
        claim = self._claims.get(resource)
        return claim if claim is not None and claim.expires_at > now else None

    def _live_run(self, owner: str, now: float) -> RunRecord | None:
        run = self._runs.get(owner)
        if run is not None and run.forgotten_at <= now:
            del self._runs[owner]
            return None
        return run

    # ------------------------------------------------------------------------------- begin

    def begin(self, request: BeginRequest) -> BeginResult:
        """See ``ExecutionStore.begin``."""
        with self._mutex:
            now = self._clock()
            run = self._live_run(request.owner, now)
            refused = self._copy_in_the_way(request, run, now) if run else None
            if refused:
                return refused
            starts = 0
            if run and request.max_crashes is not None and not run.finished:
                starts = run.starts - (run.token == request.token)
            if request.max_crashes is not None and starts >= request.max_crashes:
                return BeginResult(BeginOutcome.POISON, crashes=starts)
            claim = self._live_claim(request.claim, now) if request.claim is not None else None
            others = claim is not None and claim.owner != request.owner
            if claim and others and request.contender:
                return BeginResult(
                    BeginOutcome.DUPLICATE, holder_task_id=claim.task_id or None, holder_state=claim.state, retry_in=claim.expires_at - now, crashes=starts
                )
            lost = others or (request.claim is not None and claim is None and not request.contender)
            fence = None
            if request.lock is not None:
                lock = self._locks.setdefault(request.lock, LockRecord())
                fence = lock.take(request, now)
                if fence is None:
                    if request.claim is not None and not others:
                        since_at = claim.since_at if claim else now
                        self._claims[request.claim] = ClaimRecord(request.owner, request.task_id, ClaimState.QUEUED, since_at, now + request.claim_ttl)
                    first = lock.live(now)[0]
                    retry_in = first.expires_at - now
                    return BeginResult(BeginOutcome.BUSY, claim_lost=lost, holder_task_id=first.task_id or None, retry_in=retry_in, crashes=starts, now_at=now)
                lock.settle()
            self._record_run(request, starts, lost, now)
            if request.claim is not None and not others:
                self._start_claim(request, request.claim, claim, now)
            return BeginResult(BeginOutcome.RUN, fence=fence, claim_lost=lost, crashes=starts)

    def _copy_in_the_way(self, request: BeginRequest, run: RunRecord, now: float) -> BeginResult | None:
        if run.finished:
            return BeginResult(BeginOutcome.COPY_FINISHED) if run.generation >= request.generation else None
        left = run.lease_ends_at - now
        if left <= 0:
            return None  # that run died, whatever its generation, and work is never dropped
        if run.token == request.token:
            return self._granted_before(request, run, now)
        if run.generation > request.generation:
            return BeginResult(BeginOutcome.STALE, retry_in=left)
        if run.generation < request.generation:
            return BeginResult(BeginOutcome.PREDECESSOR_RUNNING, retry_in=left)
        run.marked = True
        return BeginResult(BeginOutcome.COPY_RUNNING, retry_in=left)

    def _granted_before(self, request: BeginRequest, run: RunRecord, now: float) -> BeginResult | None:
        crashes = run.starts - 1 if request.max_crashes is not None else 0
        if request.lock is None:
            return BeginResult(BeginOutcome.RUN, claim_lost=run.claim_lost, crashes=crashes)
        holder = self._locks.setdefault(request.lock, LockRecord()).held_by(request.token, now)
        return BeginResult(BeginOutcome.RUN, fence=holder.fence or None, claim_lost=run.claim_lost, crashes=crashes) if holder else None

    def _record_run(self, request: BeginRequest, starts: int, lost: bool, now: float) -> None:
        counted = request.max_crashes is not None
        memory = max(request.lease, request.crash_memory) if counted else request.lease
        self._runs[request.owner] = RunRecord(
            request.token, request.generation, now + request.lease, now + memory, starts=starts + 1 if counted else 0, claim_lost=lost
        )

    def _start_claim(self, request: BeginRequest, resource: str, claim: ClaimRecord | None, now: float) -> None:
        if request.until == "executing":
            self._claims.pop(resource, None)
            return
        since_at, expires_at = (claim.since_at, claim.expires_at) if claim else (now, now + request.claim_ttl)
        if request.until == "executed":
            expires_at = now + request.lease
        self._claims[resource] = ClaimRecord(request.owner, request.task_id, ClaimState.RUNNING, since_at, expires_at, request.token)

    # --------------------------------------------------------------------------------- end

    def end(self, request: EndRequest) -> EndResult:
        """See ``ExecutionStore.end``."""
        with self._mutex:
            now = self._clock()
            claim_released = self._end_claim(request, now)
            if request.token is None:
                return EndResult(claim_released=claim_released)
            slot_released = request.lock is not None and self._drop_slot(request.lock, request.token, now)
            return EndResult(slot_released, claim_released, self._end_run(request, request.token, now))

    def _end_claim(self, request: EndRequest, now: float) -> bool:
        if request.claim is None or request.claim_action is ClaimAction.KEEP:
            return False
        claim = self._live_claim(request.claim, now)
        if claim is not None and not claim.may_end(request.owner, request.token):
            return False
        if request.claim_action is ClaimAction.REQUEUE:
            run = self._live_run(request.owner, now)
            if claim is None and run is not None and (run.finished or run.token != request.token):
                return False  # another delivery of the message has run, or runs: nobody would give the claim back
            task_id, since_at = (claim.task_id, claim.since_at) if claim else (request.task_id, now)
            self._claims[request.claim] = ClaimRecord(request.owner, task_id, ClaimState.QUEUED, since_at, now + request.claim_ttl)
            return False
        if claim is None:
            return False
        if request.until == "expired":
            claim.state, claim.token = ClaimState.DONE, None
            return False
        del self._claims[request.claim]
        return True

    def _drop_slot(self, resource: str, token: str, now: float) -> bool:
        lock = self._locks.get(resource)
        if lock is None:
            return False
        lock.purge(now)
        dropped = lock.holders.pop(token, None) is not None
        lock.settle()
        return dropped

    def _end_run(self, request: EndRequest, token: str, now: float) -> bool:
        run = self._live_run(request.owner, now)
        if run is None or run.finished or run.token != token:
            return False
        copy_seen, run.marked = run.marked, False
        if request.crashed:
            run.lease_ends_at = now
        elif request.claim_action is not ClaimAction.REQUEUE and (copy_seen or request.copies_expected):
            run.finished, run.generation, run.forgotten_at = True, request.generation, now + request.finished_ttl
        else:
            del self._runs[request.owner]
        return copy_seen

    # ------------------------------------------------------------------------------ extend

    def extend(self, requests: Sequence[ExtendRequest]) -> list[ExtendResult]:
        """See ``ExecutionStore.extend``."""
        with self._mutex:
            now = self._clock()
            return [self._extend(request, now) for request in requests]

    def _extend(self, request: ExtendRequest, now: float) -> ExtendResult:
        run = self._live_run(request.owner, now)
        live = run is not None and not run.finished and run.lease_ends_at > now
        ours = run is not None and run.token == request.token
        kept = live and ours
        if not kept and (live or (run is not None and run.finished)):
            return ExtendResult(ExtendOutcome.LOST)
        if request.lock is not None:
            lock = self._locks.setdefault(request.lock, LockRecord())
            if not (lock.held_by(request.token, now) if kept else lock.retake(request, now)):
                return ExtendResult(ExtendOutcome.LOST)
            lock.holders[request.token] = replace(lock.holders[request.token], expires_at=now + request.lease)
            lock.settle()
        memory = max(request.lease, request.crash_memory)
        renewed = RunRecord(request.token, request.generation, now + request.lease, now + memory, starts=int(request.crash_memory > 0))
        if run is not None:
            renewed.starts = run.starts
            renewed.marked, renewed.claim_lost = ours and run.marked, ours and run.claim_lost
        self._runs[request.owner] = renewed
        lost = request.claim is not None and self._extend_claim(request, request.claim, now, retake=not kept)
        return ExtendResult(ExtendOutcome.HELD if kept else ExtendOutcome.RETAKEN, claim_lost=lost)

    def _extend_claim(self, request: ExtendRequest, resource: str, now: float, *, retake: bool) -> bool:
        claim = self._live_claim(resource, now)
        if (claim is None and not retake) or (claim is not None and claim.owner != request.owner):
            return True
        if retake or claim is None or (claim.state is ClaimState.RUNNING and claim.token == request.token):
            since_at = claim.since_at if claim else now
            self._claims[resource] = ClaimRecord(request.owner, request.task_id, ClaimState.RUNNING, since_at, now + request.lease, request.token)
        return False

    # --------------------------------------------------------------------------- operators

    def list_claims(self, limit: int = 1000, after: str | None = None) -> list[ClaimInfo]:
        """See ``OperatorStore.list_claims``; an ``after`` that is gone by now begins with the first."""
        with self._mutex:
            now = self._clock()
            live = [_claim_info(resource, claim) for resource, claim in self._claims.items() if claim.expires_at > now]
        return _page(sorted(live, key=lambda claim: (claim.expires_at, claim.resource)), limit, after)

    def get_claim(self, resource: str) -> ClaimInfo | None:
        """See ``OperatorStore.get_claim``."""
        with self._mutex:
            claim = self._live_claim(resource, self._clock())
            return _claim_info(resource, claim) if claim else None

    def list_locks(self, limit: int = 1000, after: str | None = None) -> list[LockInfo]:
        """See ``OperatorStore.list_locks``; an ``after`` that is gone by now begins with the first."""
        with self._mutex:
            now = self._clock()
            live = [(lock.listed_until or 0.0, _lock_info(resource, lock, now)) for resource, lock in self._locks.items()]
        return _page([lock for _, lock in sorted(live, key=lambda item: (item[0], item[1].resource)) if lock.holders], limit, after)

    def get_lock(self, resource: str) -> LockInfo | None:
        """See ``OperatorStore.get_lock``; None where nobody holds it."""
        with self._mutex:
            lock = self._locks.get(resource)
            info = _lock_info(resource, lock, self._clock()) if lock else None
            return info if info and info.holders else None

    def force_release_claim(self, resource: str, owner: str) -> bool:
        """See ``OperatorStore.force_release_claim``."""
        return self.release_claim(resource, owner)

    def force_release_slot(self, resource: str, token: str) -> bool:
        """See ``OperatorStore.force_release_slot``."""
        with self._mutex:
            return self._drop_slot(resource, token, self._clock())

    def sweep(self) -> int:
        """See ``OperatorStore.sweep``; frees the memory of what expired, too."""
        with self._mutex:
            now = self._clock()
            claims = [resource for resource, claim in self._claims.items() if claim.expires_at <= now]
            for resource in claims:
                del self._claims[resource]
            for owner in list(self._runs):
                self._live_run(owner, now)
            unlisted = 0
            for resource, lock in list(self._locks.items()):
                if lock.listed_until is not None and lock.listed_until <= now:
                    unlisted += 1
                    lock.listed_until = None
                lock.purge(now)
                if not lock.holders and lock.fence is None:
                    del self._locks[resource]
            return len(claims) + unlisted

    def facts(self) -> ServerFacts:
        """See ``OperatorStore.facts``."""
        return ServerFacts()

    def ping(self) -> None:
        """See ``OperatorStore.ping``."""


def _page(infos: Iterable[Info], limit: int, after: str | None) -> list[Info]:
    rows = list(infos)
    start = next((at + 1 for at, row in enumerate(rows) if row.resource == after), 0)
    return rows[start : start + limit]


def _claim_info(resource: str, claim: ClaimRecord) -> ClaimInfo:
    return ClaimInfo(resource, claim.owner, claim.task_id, claim.state, claim.since_at, claim.expires_at)


def _lock_info(resource: str, lock: LockRecord, now: float) -> LockInfo:
    fence = lock.fence if lock.fence_forgotten_at > now else None
    return LockInfo(resource, tuple(lock.live(now)), fence)
