"""What all ``guard`` commands share: preload options, the app's guard, and errors as exit codes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options
from click.core import ParameterSource

from celery_guard.cli import EXIT_CODES, optional, preload_options
from celery_guard.errors import ConfigurationError, GuardError, StoreUnavailable
from celery_guard.guard import Guard

__all__ = ["CommandFailed", "GuardCommand", "NotUsable", "StoreAway", "guard_command", "guard_of", "tell"]


class CommandFailed(click.ClickException):
    """Ends a command with a message on stderr: it was not done."""

    exit_code = 1


class NotUsable(CommandFailed):
    """Usage, settings or task options are wrong."""

    exit_code = 2


class StoreAway(CommandFailed):
    """The lock store did not answer."""

    exit_code = 3


class GuardCommand(CeleryCommand):
    """A command that takes the app's preload options here or before, and turns our errors into exit codes."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own options and the app's."""
        params = super().get_params(ctx)
        given = _given_before(ctx)
        return params + [optional(option) if option.name in given else option for option in preload_options(ctx) if option not in params]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            CommandFailed: For every error of celery_guard.
        """
        for name, value in _given_before(ctx).items():
            if not _is_given(ctx, name):
                ctx.params[name] = value
        try:
            return super().invoke(ctx)
        except ConfigurationError as exc:
            hint = "" if ctx.find_root().params.get("app", ctx) else " (which app? celery -A YOUR_APP guard ...)"
            raise NotUsable(exc.message + hint) from exc
        except StoreUnavailable as exc:
            raise StoreAway(exc.message) from exc
        except GuardError as exc:
            raise CommandFailed(exc.message) from exc


def _is_given(ctx: click.Context, name: str) -> bool:
    return name in ctx.params and ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


def _given_before(ctx: click.Context) -> dict[str, Any]:
    """Preload options that stand before the command in the line; the nearest wins."""
    names = [option.name for option in preload_options(ctx) if option.name]
    given: dict[str, Any] = {}
    parent = ctx.parent
    while parent is not None:
        for name in names:
            if name not in given and _is_given(parent, name):
                given[name] = parent.params[name]
        parent = parent.parent
    return given


def guard_command(group: click.Group | None = None, *, name: str | None = None) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command out of a function of the context and the options.

    The help is the function's docstring and the exit codes.

    Args:
        group: Group that gets the command, or None.
        name: Name of the command; None: that of the function.
    """

    def make(function: Callable[..., None]) -> click.Command:
        def run(ctx: click.Context, **options: Any) -> None:
            # Celery 5.4 hands the preload options on to the command, 5.7 takes them off.
            names = {option.name for option in preload_options(ctx)}
            function(ctx, **{name: value for name, value in options.items() if name not in names})

        run.__doc__ = f"{inspect.getdoc(function)}\n\n{EXIT_CODES}"
        params = getattr(function, "__click_params__", [])
        run.__click_params__ = params  # type: ignore[attr-defined]
        decorate = click.command(name or function.__name__, cls=GuardCommand)
        command: click.Command = decorate(click.pass_context(handle_preload_options(run)))
        if group is not None:
            group.add_command(command)
        return command

    return make


def guard_of(ctx: click.Context) -> Guard:
    """The guard of the app of this call; its store's connections are dropped at the end.

    Raises:
        ConfigurationError: If a setting is wrong.
    """
    guard = Guard(ctx.obj.app)
    # Not guard.close(): that would also throw away the content of a store in memory.
    ctx.call_on_close(guard.store.close)
    return guard


def tell(message: str) -> None:
    """Write a message for people, to stderr: stdout is for data."""
    click.echo(message, err=True)
