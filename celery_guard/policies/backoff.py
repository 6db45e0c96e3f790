"""How long to wait before an attempt. Pure: the random number comes in as an argument."""

from __future__ import annotations

from celery_guard.options import Backoff

__all__ = ["delay_for"]


def delay_for(backoff: Backoff, attempt: int, u: float) -> float:
    """Return the seconds to wait before an attempt.

    The stage is looked up, not computed, so no number of attempts overflows and nothing but the
    stages limits the delay.

    Args:
        backoff: Stages and jitter.
        attempt: 0 for the first postponement or retry; from the last stage on, the last stage stays.
        u: Random number in [0, 1): 0 is the low end of the jitter band, 0.5 its middle.

    Returns:
        Seconds in [stage * (1 - jitter), stage * (1 + jitter)), never negative.
    """
    delays = backoff.delays
    stage = delays[min(max(attempt, 0), len(delays) - 1)]
    return max(0.0, stage * (1.0 + backoff.jitter * (2.0 * u - 1.0)))
