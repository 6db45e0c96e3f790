"""The guard header: what one message carries about its claim and its lock.

Derived once, at dispatch; every release path works from it alone, without arguments or task class.
Pure: no clock, no random, no Celery.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery_guard.decisions import Until

__all__ = ["HEADER", "VERSION", "GuardHeader"]

#: Name of the message header.
HEADER = "guard"
VERSION = 1


@dataclass(frozen=True, slots=True)
class GuardHeader:
    """One message's identity and keys.

    Attributes:
        owner: Random token of the message, shared by its copies, retries and postponements.
        task_id: Id of the task; a header that was copied to another task is recognised by it.
        generation: 0 for the first message, one more for each retry and postponement.
        published_at: When this generation was dispatched (epoch seconds).
        claim: Resource of the claim, None if the message goes without one.
        until, ttl: When the claim is freed, and how long it lives while queued (seconds).
        lock: Resource of the execution lock, or None.
        contender: The message was sent without a claim: see ``BeginRequest.contender``.
        postponed: How many times it was postponed since its last run began.
        postponed_at: When it found its lock busy first (epoch seconds of the store's clock), or None.
        token: Execution token of the delivery, made by the worker's main process; never sent.
        received: When that process took the message (seconds of the host's monotonic clock); never sent.
        content_type: Content type of the message's body, known to the main process; never sent.
    """

    owner: str
    task_id: str
    generation: int = 0
    published_at: float = 0.0
    claim: str | None = None
    until: Until = "executed"
    ttl: float = 3600.0
    lock: str | None = None
    contender: bool = False
    postponed: int = 0
    postponed_at: float | None = None
    token: str | None = None
    received: float | None = None
    content_type: str | None = None

    @classmethod
    def from_headers(cls, headers: Any) -> GuardHeader | None:
        """Read it from message headers; None if it is absent or not to be made sense of."""
        if not isinstance(headers, Mapping):
            return None
        return cls.from_dict(headers.get(HEADER))

    @classmethod
    def from_dict(cls, data: Any) -> GuardHeader | None:
        if not isinstance(data, Mapping):
            return None
        owner, task_id = data.get("owner"), data.get("id")
        if not isinstance(owner, str) or not owner or not isinstance(task_id, str):
            return None
        until = data.get("until", "executed")
        return cls(
            owner=owner,
            task_id=task_id,
            generation=_integer(data.get("gen")),
            published_at=_number(data.get("at")) or 0.0,
            claim=_text(data.get("claim")),
            until=until if until in ("executed", "executing", "expired") else "executed",
            ttl=_number(data.get("ttl")) or 3600.0,
            lock=_text(data.get("lock")),
            contender=data.get("contender") is True,
            postponed=_integer(data.get("postponed")),
            postponed_at=_number(data.get("postponed_at")),
            token=_text(data.get("token")),
            received=_number(data.get("received")),
            content_type=_text(data.get("content_type")),
        )

    def to_dict(self, local: bool = False) -> dict[str, Any]:
        """The JSON-able form; what is at its default is left out.

        Args:
            local: True for the copy that goes from the worker's main process to its child, which
                has the delivery's own data too.
        """
        data: dict[str, Any] = {"v": VERSION, "owner": self.owner, "id": self.task_id, "at": round(self.published_at, 3)}
        if self.generation:
            data["gen"] = self.generation
        if self.claim is not None:
            data["claim"] = self.claim
            data["ttl"] = self.ttl
            if self.until != "executed":
                data["until"] = self.until
        if self.lock is not None:
            data["lock"] = self.lock
        if self.contender:
            data["contender"] = True
        if self.postponed:
            data["postponed"] = self.postponed
        if self.postponed_at is not None:
            data["postponed_at"] = self.postponed_at
        if local:
            data["token"] = self.token
            data["received"] = self.received
            data["content_type"] = self.content_type
        return data

    def successor(self, now: float) -> GuardHeader:
        """The header of a retry: next generation, nothing postponed."""
        return replace(self, generation=self.generation + 1, published_at=now, postponed=0, postponed_at=None, contender=False, token=None)

    def postponement(self, now: float, busy_at: float | None = None) -> GuardHeader:
        """The header of the message that takes this one's place after a refusal.

        Args:
            now: Time of this process.
            busy_at: Time of the store when the lock was found busy; None for another reason.
        """
        first = busy_at if self.postponed_at is None else self.postponed_at
        return replace(self, generation=self.generation + 1, published_at=now, postponed=self.postponed + 1, postponed_at=first, contender=False, token=None)

    def copy(self, now: float) -> GuardHeader:
        """The header of a postponed copy of a running message: the same generation."""
        return replace(self, published_at=now, token=None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
