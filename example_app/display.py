"""What the demo shows: progress while it works, then the table and what it means.

On a terminal with rich installed there is a moving line and colour (unless ``NO_COLOR`` is set);
anywhere else there are plain lines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TextIO

from example_app.trial import CHILDREN, LEASE, WORKERS, Outcome

__all__ = ["Display", "explanation", "rows"]

#: Seconds between two lines of progress where lines cannot be overwritten.
PACE = 2.0


class Display:
    """Progress of the demo.

    Args:
        stream: Where it is written.
        verbose: Show every step as a line of its own, at any pace.
        quiet: Show nothing.
    """

    def __init__(self, stream: TextIO, verbose: bool = False, quiet: bool = False) -> None:
        self.stream = stream
        self.verbose = verbose
        self.quiet = quiet
        self._console = None if quiet else _console(stream)
        self._status: Any = None
        self._began = time.monotonic()
        self._last = ("", 0.0)

    def say(self, text: str) -> None:
        """Write one line that stays."""
        if self._console is not None:
            self._console.print(text, highlight=False)
        elif not self.quiet:
            print(text, file=self.stream, flush=True)

    def progress(self, side: str, what: str, done: int, total: int) -> None:
        """Tell how far a side is."""
        at = f"{time.monotonic() - self._began:4.1f} s"
        count = f", {done} of {total} done" if total else ""
        text = f"{at}  {side}: {what}{count}"
        if self._console is not None:
            if self._status is None:
                self._status = self._console.status(text)
                self._status.start()
            self._status.update(text)
        if what.startswith("SIGKILL") or self._is_due(f"{side}: {what}"):
            self.say(text)

    def _is_due(self, what: str) -> bool:
        """Every new step is worth a line where there is no moving one, and a long step one now and then."""
        before, at = self._last
        if self._console is not None and not self.verbose:
            return False
        if what == before and time.monotonic() - at < PACE and not self.verbose:
            return False
        self._last = (what, time.monotonic())
        return True

    def stop(self) -> None:
        """End the moving line. Idempotent."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def table(self, outcomes: Sequence[Outcome]) -> None:
        """Show the sides beside each other."""
        self.stop()
        heads = ["", *(outcome.side for outcome in outcomes)]
        lines = rows(outcomes)
        if self._console is not None:
            from rich.table import Table

            table = Table(*heads)
            for column in table.columns[1:]:
                column.justify = "right"
            for line in lines:
                table.add_row(*line)
            self._console.print(table)
            return
        widths = [max(len(line[at]) for line in [heads, *lines]) for at in range(len(heads))]
        for line in [heads, ["-" * width for width in widths], *lines]:
            first, *others = line
            self.say("  ".join([first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True))]).rstrip())


def _console(stream: TextIO) -> Any:
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream)


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The lines of the table: what was counted, then one number for each side."""
    lines: list[tuple[str, list[str]]] = [
        ("dispatches", [str(outcome.dispatches) for outcome in outcomes]),
        ("messages sent for them", [str(outcome.messages) for outcome in outcomes]),
        ("messages postponed by workers", [str(outcome.postponements) for outcome in outcomes]),
        ("runs", [str(outcome.runs) for outcome in outcomes]),
        ("runs cut short by SIGKILL", [str(outcome.cut_short) for outcome in outcomes]),
        ("overlapping runs", [str(outcome.overlapping) for outcome in outcomes]),
        ("lost jobs", [str(outcome.lost) for outcome in outcomes]),
        (f"still locked after {LEASE:g} s", [str(len(outcome.stuck)) if outcome.side == "guarded" else "(no locks)" for outcome in outcomes]),
        ("seconds until all was done", [f"{outcome.seconds:.1f}" for outcome in outcomes]),
    ]
    return [[name, *values] for name, values in lines]


def explanation(plain: Outcome, guarded: Outcome) -> list[str]:
    """What was seen, in plain words; every number was counted in this run."""
    saved = guarded.dispatches - guarded.messages
    texts = [
        f"Both sides got the same {guarded.dispatches} dispatches, on {WORKERS} workers with {CHILDREN} processes each.",
        f"Unique dispatch: {guarded.messages} messages instead of {plain.messages}; {saved} dispatches got the result of a job that was already under way.",
        f"Execution locks: the plain tasks started {_count(plain.overlapping, 'run')} on a key that was taken, the guarded ones {guarded.overlapping}.",
        f"The price: {_count(guarded.postponements, 'message')} came too early and went back to the queue for a moment.",
    ]
    if guarded.kills:
        texts.append(f"Killed on the guarded side: {'; '.join(guarded.kills)}.")
        texts.append(f"{_count(guarded.cut_short, 'run')} died with them, and their messages were delivered again; {_count(guarded.lost, 'job')} got lost.")
    if guarded.stuck:
        texts.append(f"Left behind: {', '.join(guarded.stuck[:5])}.")
    else:
        texts.append(f"One lease ({LEASE:g} s) after the last job, no claim and no lock was left.")
    return texts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
