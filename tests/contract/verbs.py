"""Short forms of the store's requests, so that a test shows only what it is about."""

from __future__ import annotations

from typing import Any

from celery_guard.decisions import BeginRequest, BeginResult, ClaimInfo, ClaimRequest, ClaimResult, EndRequest, EndResult, ExtendRequest, ExtendResult
from celery_guard.stores.protocols import GuardStore

LEASE = 30.0
TTL = 600.0


class Verbs:
    """One store, with defaults: claims of resource "r" for TTL seconds, runs of LEASE seconds, task id "task-<owner>"."""

    def __init__(self, store: GuardStore) -> None:
        self.store = store

    def claim(self, owner: str = "o1", resource: str = "r", **options: Any) -> ClaimResult:
        return self.store.claim(ClaimRequest(**{"resource": resource, "owner": owner, "task_id": f"task-{owner}", "ttl": TTL, **options}))

    def begin(self, owner: str = "o1", token: str = "t1", **options: Any) -> BeginResult:
        who = {"owner": owner, "token": token, "generation": 0, "task_id": f"task-{owner}", "worker": "celery@host:1"}
        return self.store.begin(BeginRequest(**{**who, "lease": LEASE, "claim_ttl": TTL, **options}))

    def end(self, owner: str = "o1", token: str | None = "t1", **options: Any) -> EndResult:
        return self.store.end(EndRequest(**{"owner": owner, "token": token, "claim_ttl": TTL, **options}))

    def extend(self, owner: str = "o1", token: str = "t1", **options: Any) -> ExtendResult:
        who = {"owner": owner, "token": token, "generation": 0, "task_id": f"task-{owner}", "worker": "celery@host:1"}
        (result,) = self.store.extend([ExtendRequest(**{**who, "lease": LEASE, **options})])
        return result

    def held(self, resource: str = "r") -> ClaimInfo:
        """The claim, which must be there."""
        claim = self.store.get_claim(resource)
        assert claim is not None
        return claim

    def holders(self, resource: str = "L") -> list[str]:
        """Tokens that hold a slot."""
        lock = self.store.get_lock(resource)
        return [holder.token for holder in lock.holders] if lock else []

    def life(self, resource: str = "r") -> float:
        """Seconds that a claim has left, counted from its own store's idea of now."""
        probe = f"probe of {resource}"
        self.store.claim(ClaimRequest(probe, "probe", "probe", 1000))
        left = self.held(resource).expires_at - (self.held(probe).expires_at - 1000)
        self.store.release_claim(probe, "probe")
        return left
