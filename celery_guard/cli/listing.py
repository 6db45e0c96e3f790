"""Pages and filters of the lists of locks and claims."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import click

from celery_guard.cli.command import tell
from celery_guard.decisions import ClaimInfo, LockInfo
from celery_guard.keys import KeyDeriver

__all__ = ["json_option", "list_options", "selected"]

Info = TypeVar("Info", ClaimInfo, LockInfo)
Page = Callable[[int, str | None], list[Info]]

#: Entries that are read from the store at a time.
PAGE = 1000

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def list_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that every list has."""
    for option in (
        json_option,
        click.option("--match", metavar="TEXT", help="Only those whose key, task id or worker contains TEXT."),
        click.option("--task", "task_name", metavar="NAME", help="Only keys of this task (keys with shared=True belong to no task)."),
        click.option("--after", metavar="KEY", help="Go on behind KEY, the last one shown before."),
        click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Show at most so many."),
    ):
        function = option(function)
    return function


def selected(page: Page[Info], *, limit: int, after: str | None, task_name: str | None, match: str | None) -> list[Info]:
    """Read entries until ``limit`` of them fit; says on stderr how to go on if there are more."""
    fitting = (info for info in _entries(page, limit, after) if _fits(info, task_name, match))
    found = list(islice(fitting, limit + 1))
    if len(found) > limit:
        found.pop()
        tell(f"there are more: add --after '{found[-1].resource}'")
    return found


def _entries(page: Page[Info], limit: int, after: str | None) -> Iterator[Info]:
    size = min(max(limit + 1, 100), PAGE)
    seen: set[str] = set()
    while True:
        infos = page(size, after)
        fresh = [info for info in infos if info.resource not in seen]
        yield from fresh
        seen.update(info.resource for info in fresh)
        # Without anything new the end of the page before is gone, and the store began again.
        if len(infos) < size or not fresh:
            return
        after = infos[-1].resource


def _fits(info: ClaimInfo | LockInfo, task_name: str | None, match: str | None) -> bool:
    if task_name is not None and not info.resource.startswith(_scope(task_name)):
        return False
    return match is None or any(match in text for text in _texts(info))


def _texts(info: ClaimInfo | LockInfo) -> Sequence[str]:
    if isinstance(info, ClaimInfo):
        return (info.resource, info.task_id)
    return (info.resource, *(text for holder in info.holders for text in (holder.task_id, holder.worker)))


def _scope(task_name: str) -> str:
    """What all keys of a task begin with, written like ``keys`` writes it."""
    return KeyDeriver(task=task_name, option="unique", spec=(), signature=inspect.Signature()).derive((), {}).removesuffix("*")
