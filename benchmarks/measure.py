"""Ways to measure: CPU of interleaved pairs, and exact counts of what a server was asked."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

__all__ = ["Pair", "calls", "interleaved"]


@dataclass(frozen=True)
class Pair:
    """CPU seconds per call of a plain and a guarded way, medians, and the median of their ratios."""

    plain: float
    guarded: float
    ratio: float


def interleaved(plain: Callable[[int], object], guarded: Callable[[int], object], *, calls_each: int, rounds: int) -> Pair:
    """Time two ways in turns within one process, so that a slow minute hits both alike.

    The order within a round alternates. CPU time of this process is taken, since the machines on which
    this runs are shared.

    Args:
        plain: Called with numbers that do not come again.
        guarded: Likewise.
        calls_each: Calls of each way in one round.
        rounds: How many rounds; the medians are over them.
    """
    number = 0

    def once(call: Callable[[int], object]) -> float:
        nonlocal number
        numbers = range(number, number + calls_each)
        number += calls_each
        gc.collect()
        start = time.process_time()
        for n in numbers:
            call(n)
        return (time.process_time() - start) / calls_each

    once(plain)
    once(guarded)
    plains: list[float] = []
    guardeds: list[float] = []
    for turn in range(rounds):
        for call, times in ((plain, plains), (guarded, guardeds))[:: 1 if turn % 2 else -1]:
            times.append(once(call))
    ratio = statistics.median(p / g for p, g in zip(plains, guardeds, strict=True))
    return Pair(statistics.median(plains), statistics.median(guardeds), ratio)


def calls(client: redis.Redis, action: Callable[[], object]) -> int:
    """Count the scripts that the server was asked to run during ``action`` (round trips of a store verb)."""

    def count() -> int:
        stats = client.info("commandstats")
        return sum(int(stats[name]["calls"]) for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats)

    before = count()
    action()
    return count() - before
