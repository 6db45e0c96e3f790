"""What the store in memory keeps: claims, run records and locks, and how slots are taken."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from celery_guard.decisions import BeginRequest, ClaimState, ExtendRequest, Holder

__all__ = ["ClaimRecord", "LockRecord", "RunRecord"]

#: Seconds that the last fence of a lock is remembered.
FENCE_MEMORY = 86400.0


@dataclass(slots=True)
class ClaimRecord:
    owner: str
    task_id: str
    state: ClaimState
    since_at: float
    expires_at: float
    token: str | None = None  # of the run, while RUNNING

    def may_end(self, owner: str, token: str | None) -> bool:
        """Whether an end with these tokens concerns it: a running claim belongs to its run alone."""
        return self.owner == owner and (self.state is not ClaimState.RUNNING or self.token == token)


@dataclass(slots=True)
class RunRecord:
    token: str
    generation: int
    lease_ends_at: float
    forgotten_at: float
    starts: int = 0
    marked: bool = False
    claim_lost: bool = False
    finished: bool = False


@dataclass(slots=True)
class LockRecord:
    """Slots of one lock; the last fence outlives them."""

    holders: dict[str, Holder] = field(default_factory=dict)
    fence: int | None = None
    fence_forgotten_at: float = 0.0
    listed_until: float | None = None

    def purge(self, now: float) -> None:
        for token in [token for token, holder in self.holders.items() if holder.expires_at <= now]:
            del self.holders[token]
        if self.fence_forgotten_at <= now:
            self.fence = None

    def settle(self) -> None:
        self.listed_until = max((holder.expires_at for holder in self.holders.values()), default=None)

    def held_by(self, token: str, now: float) -> Holder | None:
        """The slot of a token, unless it has lapsed."""
        holder = self.holders.get(token)
        return holder if holder and holder.expires_at > now else None

    def live(self, now: float) -> list[Holder]:
        return sorted((holder for holder in self.holders.values() if holder.expires_at > now), key=lambda holder: (holder.expires_at, holder.token))

    def take(self, request: BeginRequest, now: float) -> int | None:
        """Return the fence of a slot, or None when all are taken."""
        self.purge(now)
        if mine := self.holders.get(request.token):
            self.holders[request.token] = replace(mine, expires_at=now + request.lease)
            return mine.fence
        if len(self.holders) >= request.limit:
            return None
        fence = max((self.fence or 0) + 1, int(now * 1_000_000))
        self.fence, self.fence_forgotten_at = fence, now + FENCE_MEMORY
        self.holders[request.token] = Holder(request.token, request.task_id, request.worker, now, now + request.lease, fence)
        return fence

    def retake(self, request: ExtendRequest, now: float) -> bool:
        """Take a slot again after a lapse; with one slot only when nobody was granted a later number."""
        self.purge(now)
        if request.token in self.holders:
            return True
        fence = request.fence or 0
        if len(self.holders) >= request.limit or (request.limit == 1 and self.fence not in (None, fence)):
            return False
        if self.fence is None:
            self.fence, self.fence_forgotten_at = fence, now + FENCE_MEMORY
        self.holders[request.token] = Holder(request.token, request.task_id, request.worker, now, now + request.lease, fence)
        return True
