"""What the demo sends: one list of jobs, for the plain and the guarded side alike."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

__all__ = ["FEWEST_JOBS", "LIMITS", "LONG", "Job", "jobs"]

FEWEST_JOBS = 20
#: Runs at once that the story allows for one key, by job.
LIMITS = {"rebuild_summary": 1, "build_index": 1, "sync_stock": 1, "import_prices": 1, "call_warehouse": 2, "deliver_webhook": 1}
#: The job that is long enough to be killed in the middle.
LONG = "import_prices"


@dataclass(frozen=True, slots=True)
class Job:
    """One dispatch: name of the job (``plain_`` in front of it is its twin) and its arguments."""

    name: str
    args: tuple[Any, ...]


def jobs(number: int, seed: int) -> list[Job]:
    """Make a burst of ``number`` jobs; the same for the same seed.

    Half of them rebuild summaries of few products, as when a catalogue is edited. Four long imports
    come first and two last, since the demo kills processes in the middle of one.
    """
    chance = random.Random(seed)
    webhooks = max(2, number * 14 // 100 // 2 * 2)
    counts = {"build_index": number * 4 // 100 + 1, "sync_stock": number * 16 // 100, "call_warehouse": number * 12 // 100}
    made = [Job("build_index", ("catalogue",)) for _ in range(counts["build_index"])]
    made += [Job("sync_stock", (each % 3, each)) for each in range(counts["sync_stock"])]
    made += [Job("call_warehouse", ("north", each)) for each in range(counts["call_warehouse"])]
    made += [Job("deliver_webhook", (f"shop-{event % 2}", event)) for event in range(webhooks // 2) for _ in range(2)]
    long_ones = [Job(LONG, (each % 2, each)) for each in range(6)]
    made += [Job("rebuild_summary", (chance.randrange(5),)) for _ in range(number - len(made) - len(long_ones))]
    chance.shuffle(made)
    return long_ones[:4] + made + long_ones[4:]
