"""Decisions of the execution lock: what a run does that finds no free slot. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from celery_guard.options import Backoff, WithoutOverlapping
from celery_guard.policies.backoff import delay_for

__all__ = ["COPY_DELAYS", "PREDECESSOR_DELAYS", "STORE_DELAYS", "GiveUp", "Postpone", "Raise", "Refusal", "Skip", "capped", "on_busy"]

#: The run that sent this retry is about to end: look again soon.
PREDECESSOR_DELAYS = Backoff((0.1, 0.5, 2, 5), jitter=0.2)
#: A copy of a running message: it is only needed if the run dies.
COPY_DELAYS = Backoff((1, 5, 15), jitter=0.2)
#: The lock store is away.
STORE_DELAYS = Backoff((1, 2, 5, 10, 30), jitter=0.2)


@dataclass(frozen=True, slots=True)
class Postpone:
    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    waited: float


@dataclass(frozen=True, slots=True)
class Skip:
    pass


@dataclass(frozen=True, slots=True)
class Raise:
    pass


Refusal = Postpone | GiveUp | Skip | Raise


def on_busy(options: WithoutOverlapping, *, postponed: int, waited: float, u: float, ceiling: float | None) -> Refusal:
    """Decide what a run does that finds every slot taken.

    Args:
        options: The lock's options.
        postponed: How many times the message has been postponed already.
        waited: Seconds since its first postponement.
        u: Random number from [0, 1), for the jitter.
        ceiling: Longest delay that the broker can hold safely (seconds), or None.
    """
    if options.on_conflict == "skip":
        return Skip()
    if options.on_conflict == "raise":
        return Raise()
    limit = options.give_up_after_seconds
    if limit is not None and postponed and waited >= limit:
        return GiveUp(waited)
    delay = delay_for(options.backoff, postponed, u)
    if limit is not None:
        # Come back at the end of the patience, not one whole stage after it.
        delay = min(delay, max(limit - waited, 0.05))
    return Postpone(capped(delay, ceiling))


def capped(delay: float, ceiling: float | None) -> float:
    """A delay that is never immediate and never longer than the broker can hold."""
    if ceiling is not None:
        delay = min(delay, ceiling)
    return max(delay, 0.05)
