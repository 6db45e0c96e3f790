"""What tasks wrote about themselves, seen from outside: runs, their ends, and how many went on at once.

Every event is one line, written with one ``write`` to a file opened for appending, so that the lines
of many processes do not mix and nothing is lost when the writer is killed next. Instants are those of
the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Event", "Span", "Trace", "highest_overlap", "note"]


def note(log: str | Path, what: str, **fields: Any) -> None:
    """Append one event to ``log``; pid and time are added."""
    line = json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **fields}) + "\n"
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


@dataclass(frozen=True)
class Event:
    what: str
    at: float
    pid: int
    fields: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Span:
    """One run of a body; ``end`` is None while it goes on. A killed run ends with the kill."""

    call: str
    key: str
    token: str
    pid: int
    start: float
    end: float | None
    killed: bool


class Trace:
    """Reads the log that tasks and the killer write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def events(self, what: str | None = None, **fields: Any) -> list[Event]:
        """Return the events in the order they were written, those named ``what`` and with these fields only."""
        found = []
        text = self.path.read_text() if self.path.exists() else ""
        for line in text.splitlines():
            data = json.loads(line)
            event = Event(data.pop("what"), data.pop("at"), data.pop("pid"), data)
            if what in (None, event.what) and all(event.fields.get(name) == value for name, value in fields.items()):
                found.append(event)
        return found

    def happened(self, what: str, **fields: Any) -> bool:
        return bool(self.events(what, **fields))

    def calls(self, what: str) -> set[str]:
        """Return the names of the calls that wrote ``what``."""
        return {event.call for event in self.events(what)}

    def spans(self) -> list[Span]:
        """Return every run, in order of its start."""
        events = self.events()
        ends = {(event.token, event.pid): event.at for event in events if event.what == "end"}
        kills: dict[int, list[float]] = defaultdict(list)
        for event in events:
            if event.what == "kill":
                for pid in event.pids:
                    kills[pid].append(event.at)
        spans = []
        for event in events:
            if event.what != "start":
                continue
            end, killed = ends.get((event.token, event.pid)), False
            if end is None and kills[event.pid]:
                # The kill is noted before it is sent: a start in between is of no length.
                end, killed = max(event.at, kills[event.pid][-1]), True
            spans.append(Span(event.call, event.key, event.token, event.pid, event.at, end, killed))
        return sorted(spans, key=lambda span: span.start)


def highest_overlap(spans: Iterable[Span]) -> int:
    """Return the largest number of runs that went on at one moment."""
    changes = []
    for span in spans:
        changes.append((span.start, 1))
        changes.append((float("inf") if span.end is None else span.end, -1))
    highest = now = 0
    for _, change in sorted(changes):  # an end before a start of the same moment
        now += change
        highest = max(highest, now)
    return highest
