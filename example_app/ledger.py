"""The ledger: one line for every start and end of a run and for every message sent, and what the lines amount to.

It is a file outside of all processes, so that runs and overlaps are counted by what happened, not by
what a worker or a lock believes. Standard library only.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Run", "count_overlaps", "entries", "now", "record", "run", "runs"]


def now() -> float:
    """Seconds on the machine's monotonic clock, which all processes share."""
    return time.monotonic()


def record(what: str, **fields: Any) -> None:
    """Append one line to the file of ``EXAMPLE_LOG``; does nothing where that is unset.

    One write in append mode: the lines of many processes do not mix, and a killed process leaves whole lines.
    """
    path = os.environ.get("EXAMPLE_LOG")
    if not path:
        return
    line = json.dumps({"at": now(), "what": what, "pid": os.getpid(), **fields}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


@contextmanager
def run(task: Any, key: str, seconds: float, **details: Any) -> Iterator[None]:
    """Trace one run of a task.

    Args:
        task: The bound task.
        key: What the run works on.
        seconds: How long it is going to take.
        **details: More for the reader of the file.
    """
    fields = {"task": task.name, "id": task.request.id, "key": key}
    record("start", parent=os.getppid(), seconds=seconds, **details, **fields)
    yield
    record("end", **fields)


def entries(path: Path) -> list[dict[str, Any]]:
    """All lines of a ledger in the order of their time; none if there is no file yet."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    return sorted((json.loads(line) for line in whole.splitlines()), key=lambda entry: float(entry["at"]))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a task.

    Attributes:
        started, ended: Instants of ``now``; ``ended`` is None for a run that was cut short or still goes on.
        seconds: How long it was going to take.
        parent: Pid of the worker's main process; ``pid`` is the child's.
    """

    task: str
    key: str
    task_id: str
    pid: int
    parent: int
    started: float
    seconds: float
    ended: float | None = None


def runs(lines: Iterable[Mapping[str, Any]]) -> list[Run]:
    """Pair the starts and ends of a ledger; in order of their start."""
    open_runs: dict[tuple[int, str], dict[str, Any]] = {}
    found: list[dict[str, Any]] = []
    for line in lines:
        place = (line["pid"], line.get("id", ""))
        if line["what"] == "start":
            fields = {name: line[name] for name in ("task", "key", "pid", "parent", "seconds")}
            open_runs[place] = {**fields, "task_id": line["id"], "started": line["at"]}
            found.append(open_runs[place])
        elif line["what"] == "end" and place in open_runs:
            open_runs.pop(place)["ended"] = line["at"]
    return [Run(**fields) for fields in found]


def count_overlaps(found: Iterable[Run], limits: Mapping[str, int], killed: Mapping[int, float]) -> int:
    """Count the runs that began while as many others as allowed were at work on the same key.

    Args:
        found: The runs.
        limits: Runs at once that a task allows for one key, by its name.
        killed: When which process was killed; a run without an end lasted until then, or else to this day.
    """
    by_key: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for item in sorted(found, key=lambda item: item.started):
        by_key[item.task, item.key].append(item)
    overlapping = 0
    for (task, _), group in by_key.items():
        ends: list[float] = []
        for item in group:
            ends = [end for end in ends if end > item.started]
            overlapping += len(ends) >= limits[task]
            ends.append(item.ended if item.ended is not None else killed.get(item.pid, float("inf")))
    return overlapping
