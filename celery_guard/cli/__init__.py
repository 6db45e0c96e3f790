"""``celery -A app guard …``: the entry point, imported by every ``celery`` command.

Imports only click. What a sub-command needs is imported when that sub-command runs, so a worker
that starts pays nothing for it and ``guard --help`` loads no store.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import click

__all__ = ["EXIT_CODES", "GuardGroup", "guard", "optional", "preload_options"]

EXIT_CODES = """\b
Exit codes:
  0  done
  1  not done: not held, changed meanwhile, refused by you, no key
  2  wrong usage, settings or task options
  3  the lock store is away
"""


def preload_options(ctx: click.Context) -> list[click.Parameter]:
    """Options that the app itself adds to every command (``app.user_options["preload"]``)."""
    options: Mapping[str, Iterable[click.Parameter]] = getattr(getattr(ctx.obj, "app", None), "user_options", None) or {}
    return list(options.get("preload", ()))


class GuardGroup(click.Group):
    """A group whose sub-commands may be imported late, and that takes the app's preload options.

    Args:
        later: For each sub-command its module and a line of help; the module has it under its own name.
    """

    def __init__(self, *args: Any, later: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.later = dict(later or {})
        if self.callback is None:
            self.callback = _accept_everything

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in alphabetical order."""
        return sorted({*self.commands, *self.later})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the sub-command if that has not been done."""
        if cmd_name not in self.commands and cmd_name in self.later:
            self.add_command(getattr(import_module(self.later[cmd_name][0]), cmd_name), cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Propose the nearest name for one that does not exist."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, self.list_commands(ctx), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self.list_commands(ctx))}"
            ctx.fail(f"No such command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the sub-commands without importing them."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.commands.get(name)
            rows.append((name, self.later[name][1] if command is None else command.get_short_help_str(80)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The group's own options and the app's; the last command of the line is the one that needs them."""
        preload = preload_options(ctx)
        own = [param for param in super().get_params(ctx) if param not in preload]
        return [*own, *map(optional, preload)]


def optional(option: click.Parameter) -> click.Parameter:
    """The same option, but not missing where it is not given."""
    option = copy.copy(option)
    option.required = False
    return option


def _accept_everything(**_preload: Any) -> None:
    """The values of preload options are told by the last command of the line, once."""


# Celery wraps the callback of every plugin (bin/celery.py, 5.7), to send ``user_preload_options`` with what
# the group got: nothing, when the option comes later in the line. Receivers take that for a missing option.
_as_any: Callable[..., Any] = _accept_everything
_as_any._handles_preload_options = True  # type: ignore[attr-defined]


guard = GuardGroup(
    "guard",
    help="See and correct what celery_guard holds: locks of running tasks, claims of dispatched ones.\n\n"
    "Reads the lock store only, so it answers while workers are busy or down.\n\n" + EXIT_CODES,
    short_help="Locks and claims of celery_guard.",
    later={
        "claims": ("celery_guard.cli.claims", "Claims: which work is queued or running, and cannot be dispatched again."),
        "config": ("celery_guard.cli.config", "The settings in effect, without passwords."),
        "explain": ("celery_guard.cli.explain", "What a call of a task is guarded by, who holds it, what would happen now."),
        "locks": ("celery_guard.cli.locks", "Locks: which runs hold a slot, and keep others from running."),
    },
)
