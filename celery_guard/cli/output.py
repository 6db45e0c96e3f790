"""How data is shown: aligned columns or JSON on stdout, times in UTC, ages for people."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from celery_guard.validation import shown

__all__ = ["age", "iso", "print_json", "print_table", "printable", "remaining"]


def iso(at: float) -> str:
    """An instant (epoch seconds) in UTC, ISO 8601, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age(seconds: float) -> str:
    """A duration for people: its two largest units. Never negative: the clocks of client and server differ."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        amount, left = divmod(left, size)
        if amount or parts:
            parts.append(f"{amount}{unit}")
    return "".join(parts[:2]) or "0s"


def remaining(expires_at: float, now: float | None = None) -> str:
    """Time until an instant (epoch seconds), for people."""
    return age(expires_at - (time.time() if now is None else now))


def printable(value: object) -> str:
    """Text that cannot steer a terminal: ids and host names come from messages."""
    text = "-" if value is None or value == "" else str(value)
    return text if text.isprintable() else "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def print_json(data: Any) -> None:
    """Write one JSON document to stdout; what JSON does not know is shown as text."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=not _speaks_unicode(), default=shown))


def _speaks_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, no_color: bool) -> None:
    """Write a table to stdout: with ``rich`` on a terminal if it is installed, else plain aligned columns.

    Args:
        headings: One for each column.
        rows: Cells; None is shown as ``-``.
        no_color: True if colours were declined; NO_COLOR and a pipe decline them too.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and _print_rich(headings, cells, plain=no_color or "NO_COLOR" in os.environ):
        return
    table = [list(headings), *cells]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    for row in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_rich(headings: Sequence[str], cells: Sequence[Sequence[str]], *, plain: bool) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")  # never cut: keys are there to be copied
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))  # Text: brackets in a key are no markup
    Console(color_system=None if plain else "auto", highlight=False).print(table)
    return True
