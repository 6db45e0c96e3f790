"""Decisions of unique dispatch: how long a claim lives, and what becomes of a duplicate. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

__all__ = ["Conflict", "carries_continuation", "claim_ttl", "resolve_conflict"]

#: Options of a dispatch that make somebody wait for exactly this message.
CONTINUATIONS = ("link", "link_error", "chord", "group_id", "group_index")


class Conflict(StrEnum):
    """What a dispatch does whose key is claimed by another message."""

    SKIP = "skip"
    RAISE = "raise"
    RUN = "run"  # send it without a claim, so that no workflow waits for ever


def carries_continuation(options: Mapping[str, Any]) -> bool:
    """Tell whether a workflow waits for exactly this message.

    The last step of a chain arrives with an empty ``chain`` (Celery 5.4 to 5.7, ``app/trace.py``), a
    chord's body and other frozen signatures with ``reply_to``: none of them carries callbacks, yet
    their ids have been handed out, and a result under that id is waited for.
    """
    if any(options.get(name) for name in CONTINUATIONS):
        return True
    return options.get("group_index") is not None or options.get("chain") is not None or options.get("reply_to") is not None


def resolve_conflict(on_conflict: Literal["skip", "raise"], continuation: bool) -> Conflict:
    """Decide what a duplicate dispatch does."""
    if on_conflict == "raise":
        return Conflict.RAISE
    return Conflict.RUN if continuation else Conflict.SKIP


def claim_ttl(ttl: float, delay: float, expires_in: float | None, grace: float = 5.0) -> float:
    """Seconds that the claim of a message lives while it waits.

    Args:
        ttl: The option's ttl.
        delay: Seconds until the message's ETA, 0 if it has none or if that has passed.
        expires_in: Seconds until the message expires, None if it does not.
        grace: What a message may live beyond its expiry before a worker discards it.
    """
    life = ttl + max(0.0, delay)
    if expires_in is not None:
        life = min(life, max(0.0, expires_in) + grace)
    return max(life, 0.001)
