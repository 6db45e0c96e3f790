"""What a lock store must do. The contract suite in ``tests/contract`` is the law behind the words.

Every verb that changes state is atomic and idempotent for the same tokens, so that a caller whose
answer got lost may repeat it. All verbs raise ``StoreUnavailable`` when the server is away, too
slow or refuses the command, and nothing else for the server's sake. A store belongs to one process: after a fork it is
dropped and made anew (``Guard`` sees to that); within the process it may be used by many threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from celery_guard.decisions import (
    BeginRequest,
    BeginResult,
    ClaimInfo,
    ClaimRequest,
    ClaimResult,
    EndRequest,
    EndResult,
    ExtendRequest,
    ExtendResult,
    LockInfo,
    ServerFacts,
)

__all__ = ["ClaimStore", "ExecutionStore", "GuardStore", "OperatorStore"]


class ClaimStore(Protocol):
    """Dispatch side."""

    def claim(self, request: ClaimRequest) -> ClaimResult:
        """Take, renew or find held the claim of a resource. One round trip."""
        ...

    def release_claim(self, resource: str, owner: str, ttl: float | None = None) -> bool:
        """Free the claim if ``owner`` holds it.

        Args:
            resource: Resource of the claim.
            owner: Only a claim of this owner is touched.
            ttl: None frees at once; a number of seconds shortens the life of the claim to that
                (never lengthens it), for a dispatch whose fate is unknown.

        Returns:
            Whether ``owner`` held it.
        """
        ...


class ExecutionStore(Protocol):
    """Worker side."""

    def begin(self, request: BeginRequest) -> BeginResult:
        """Ask to run: claim, copy and crash checks, then slot; all or nothing. One round trip."""
        ...

    def end(self, request: EndRequest) -> EndResult:
        """Give back slot, claim and run record. One round trip."""
        ...

    def extend(self, requests: Sequence[ExtendRequest]) -> list[ExtendResult]:
        """Extend all that a process holds, in order. One round trip however many."""
        ...


class OperatorStore(Protocol):
    """For people: never scans the server, reads the index kept by the verbs above."""

    def list_claims(self, limit: int = 1000, after: str | None = None) -> list[ClaimInfo]:
        """Live claims in order of their expiry; ``after`` is the resource that ended the page before."""
        ...

    def get_claim(self, resource: str) -> ClaimInfo | None: ...

    def list_locks(self, limit: int = 1000, after: str | None = None) -> list[LockInfo]:
        """Locks with at least one live holder, in order of their expiry."""
        ...

    def get_lock(self, resource: str) -> LockInfo | None: ...

    def force_release_claim(self, resource: str, owner: str) -> bool:
        """Free a claim whatever its state, if ``owner`` (as it was shown) still holds it."""
        ...

    def force_release_slot(self, resource: str, token: str) -> bool:
        """Take the slot away from ``token`` (as it was shown); its run learns that it lost the lock."""
        ...

    def sweep(self) -> int:
        """Drop index entries of what has expired; returns how many."""
        ...

    def facts(self) -> ServerFacts:
        """What the server tells of itself; a forbidden command is None, not an error."""
        ...

    def ping(self) -> None:
        """Raise StoreUnavailable unless the server answers."""
        ...


@runtime_checkable
class GuardStore(ClaimStore, ExecutionStore, OperatorStore, Protocol):
    """The whole of it."""

    @property
    def address(self) -> str:
        """The server for people and logs, never with a password."""
        ...

    def close(self) -> None:
        """Drop the connections; the store may be used again, with new ones."""
        ...
