"""Release by hand, of locks and claims alike: show, ask, then act on exactly what was shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from celery_guard.cli.command import CommandFailed, NotUsable, tell
from celery_guard.cli.output import print_json, printable

__all__ = ["Held", "release", "release_options"]


@dataclass(frozen=True, slots=True)
class Held:
    """One slot or claim that is to be released.

    Attributes:
        text: What it is and who has it, for people.
        data: The same for ``--json``.
        take: Releases it if it is still held as shown; returns whether it was.
    """

    text: str
    data: dict[str, Any]
    take: Callable[[], bool]


def release_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that every release has."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text."),
        click.option("--dry-run", is_flag=True, help="Show what would be released, and change nothing."),
        click.option("--yes", "-y", is_flag=True, help="Do not ask."),
    ):
        function = option(function)
    return function


def release(held: Sequence[Held], *, risk: str, now_held: Callable[[], str], yes: bool, dry_run: bool, as_json: bool) -> None:
    """Release after asking.

    Args:
        held: What is to be released; not empty.
        risk: What releasing means, for the question.
        now_held: Tells who holds it, asked when it changed meanwhile.
        yes: Do not ask.
        dry_run: Only show.
        as_json: Print JSON.

    Raises:
        CommandFailed: Nobody can be asked, the answer was no, or something changed meanwhile.
    """
    if dry_run:
        _report(held, [], "would release", as_json)
        tell("dry run: nothing was changed")
        return
    if not yes:
        _ask(held, risk)
    released: list[Held] = []
    kept: list[Held] = []
    for item in held:
        (released if item.take() else kept).append(item)
    _report(released, kept, "released", as_json)
    if kept:
        nothing = "" if released else "; nothing was released"
        raise CommandFailed(f"changed meanwhile, no longer held as shown: {', '.join(printable(item.text) for item in kept)}{nothing}. Now: {now_held()}")


def _ask(held: Sequence[Held], risk: str) -> None:
    for item in held:
        tell(printable(item.text))
    if not sys.stdin.isatty():
        raise NotUsable("nobody can be asked here: give --yes to release it, or --dry-run to look only")
    tell(risk)
    try:
        agreed = click.confirm("Release?", default=False, err=True)
    except click.Abort:
        agreed = False
    if not agreed:
        raise CommandFailed("nothing was released")


def _report(done: Sequence[Held], kept: Sequence[Held], verb: str, as_json: bool) -> None:
    if as_json:
        print_json([{**item.data, "released": item in done and verb == "released"} for item in (*done, *kept)])
        return
    for item in done:
        click.echo(f"{verb}: {printable(item.text)}")
