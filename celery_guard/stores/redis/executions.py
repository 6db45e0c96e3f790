"""Worker side of the Redis store: begin, end and extend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_guard.decisions import BeginOutcome, BeginRequest, BeginResult, EndRequest, EndResult, ExtendOutcome, ExtendRequest, ExtendResult
from celery_guard.keys import redis_key
from celery_guard.stores.redis.claims import CLAIM_STATES, RedisClaims
from celery_guard.stores.redis.scripts import milliseconds, text

__all__ = ["RedisExecutions"]

# How the scripts number their outcomes.
_BEGIN = (
    BeginOutcome.RUN,
    BeginOutcome.DUPLICATE,
    BeginOutcome.BUSY,
    BeginOutcome.COPY_RUNNING,
    BeginOutcome.COPY_FINISHED,
    BeginOutcome.PREDECESSOR_RUNNING,
    BeginOutcome.STALE,
    BeginOutcome.POISON,
)
#: What a short answer leaves unsaid: outcome, fence, claim lost, crashes, retry in, task id, state, time.
_UNSAID: tuple[Any, ...] = (0, 0, 0, 0, -1, b"", 0, 0)
_EXTEND = (ExtendOutcome.HELD, ExtendOutcome.RETAKEN, ExtendOutcome.LOST)
_CLAIM_LOST = 10
#: Runs extended in one script; a process that holds more sends several, so that the server is not held up.
_EXTEND_AT_ONCE = 2000


class RedisExecutions(RedisClaims):
    """``ExecutionStore`` on one Redis server."""

    def begin(self, request: BeginRequest) -> BeginResult:
        """See ``ExecutionStore.begin``."""
        keys = [redis_key(self._prefix, request.owner, "run")]
        if request.claim is not None:
            keys += (redis_key(self._prefix, request.claim, "claim"), self._claims)
        if request.lock is not None:
            keys += (*self._lock_keys(request.lock), self._locks)
        args = (
            request.owner,
            request.token,
            str(request.generation),
            request.task_id,
            request.worker,
            milliseconds(request.lease),
            "-1" if request.max_crashes is None else str(request.max_crashes),
            milliseconds(request.crash_memory),
            request.claim or "",
            request.until,
            milliseconds(request.claim_ttl),
            "1" if request.contender else "0",
            request.lock or "",
            str(request.limit),
        )
        reply: list[Any] = self._link.run("begin", keys, args)
        outcome, fence, lost, crashes, left, task_id, state, now = (*reply, *_UNSAID[len(reply) :])
        return BeginResult(
            _BEGIN[outcome],
            fence=fence or None,
            claim_lost=bool(lost),
            holder_task_id=text(task_id) or None,
            holder_state=CLAIM_STATES.get(state),
            retry_in=None if left < 0 else left / 1000,
            crashes=crashes,
            now_at=now / 1000 or None,
        )

    def end(self, request: EndRequest) -> EndResult:
        """See ``ExecutionStore.end``."""
        keys = [redis_key(self._prefix, request.owner, "run")]
        if request.claim is not None:
            keys += (redis_key(self._prefix, request.claim, "claim"), self._claims)
        if request.lock is not None:
            slots, holders, _ = self._lock_keys(request.lock)
            keys += (slots, holders, self._locks)
        args = (
            request.owner,
            request.token or "",
            str(request.generation),
            request.claim or "",
            request.until,
            request.claim_action,
            milliseconds(request.claim_ttl),
            request.lock or "",
            "1" if request.crashed else "0",
            milliseconds(request.finished_ttl),
            "1" if request.copies_expected else "0",
            request.task_id,
        )
        slot, claim, copy = self._link.run("end", keys, args)
        return EndResult(slot_released=bool(slot), claim_released=bool(claim), copy_seen=bool(copy))

    def extend(self, requests: Sequence[ExtendRequest]) -> list[ExtendResult]:
        """See ``ExecutionStore.extend``."""
        results: list[ExtendResult] = []
        for start in range(0, len(requests), _EXTEND_AT_ONCE):
            keys = [self._claims, self._locks]
            args: list[str] = []
            for request in requests[start : start + _EXTEND_AT_ONCE]:
                keys += self._extend_keys(request)
                args += _extend_args(request)
            results += (ExtendResult(_EXTEND[code % _CLAIM_LOST], code >= _CLAIM_LOST) for code in self._link.run("extend", keys, args))
        return results

    def _extend_keys(self, request: ExtendRequest) -> list[str]:
        keys = [redis_key(self._prefix, request.owner, "run")]
        if request.claim is not None:
            keys.append(redis_key(self._prefix, request.claim, "claim"))
        if request.lock is not None:
            keys += self._lock_keys(request.lock)
        return keys

    def _lock_keys(self, resource: str) -> tuple[str, str, str]:
        prefix = self._prefix
        return redis_key(prefix, resource, "slots"), redis_key(prefix, resource, "holders"), redis_key(prefix, resource, "fence")


def _extend_args(request: ExtendRequest) -> tuple[str, ...]:
    return (
        request.owner,
        request.token,
        str(request.generation),
        request.task_id,
        request.worker,
        milliseconds(request.lease),
        str(round(request.crash_memory * 1000)),
        request.claim or "",
        request.lock or "",
        str(request.limit),
        str(request.fence or 0),
    )
