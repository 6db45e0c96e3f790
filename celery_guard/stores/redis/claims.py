"""Dispatch side of the Redis store: claims."""

from __future__ import annotations

from celery_guard.decisions import ClaimOutcome, ClaimRequest, ClaimResult, ClaimState
from celery_guard.keys import redis_key
from celery_guard.stores.redis.link import Link
from celery_guard.stores.redis.scripts import milliseconds, text

__all__ = ["CLAIM_STATES", "RedisClaims"]

#: How the scripts number the states of a claim.
CLAIM_STATES = {1: ClaimState.QUEUED, 2: ClaimState.RUNNING, 3: ClaimState.DONE}
_CLAIMED = ClaimResult(ClaimOutcome.CLAIMED)
_OWN = ClaimResult(ClaimOutcome.OWN)


class RedisClaims:
    """``ClaimStore`` on one Redis server."""

    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix
        self._claims = f"{prefix}:1:index:claims"
        self._locks = f"{prefix}:1:index:locks"

    def claim(self, request: ClaimRequest) -> ClaimResult:
        """See ``ClaimStore.claim``."""
        resource = request.resource
        keys = (redis_key(self._prefix, resource, "claim"), self._claims)
        reply = self._link.run("claim", keys, (resource, request.owner, request.task_id, milliseconds(request.ttl)))
        if reply == 0:
            return _CLAIMED
        if reply == 1:
            return _OWN
        task_id, state, age = reply
        return ClaimResult(ClaimOutcome.HELD, text(task_id) or None, CLAIM_STATES[state], age / 1000)

    def release_claim(self, resource: str, owner: str, ttl: float | None = None) -> bool:
        """See ``ClaimStore.release_claim``."""
        keys = (redis_key(self._prefix, resource, "claim"), self._claims)
        return bool(self._link.run("release_claim", keys, (resource, owner, "-1" if ttl is None else milliseconds(ttl))))
