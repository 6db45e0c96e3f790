"""``guard config``: the settings in effect."""

from __future__ import annotations

import click

from celery_guard.cli.command import guard_command, guard_of, tell
from celery_guard.cli.listing import json_option
from celery_guard.cli.output import print_json, print_table
from celery_guard.config import SETTINGS, Setting
from celery_guard.validation import shown

__all__ = ["config"]


@guard_command()
@json_option
def config(ctx: click.Context, *, as_json: bool) -> None:
    """Show every guard_* setting with the value in effect; passwords are masked.

    A name that is misspelt, or spelt as Celery does not read it, is an error here as it is in a worker.
    """
    guard = guard_of(ctx)
    settings = guard.settings
    redacted = settings.redacted()
    if as_json:
        print_json(
            [
                {"name": setting.name, "value": redacted[setting.name], "default": setting.default, "required": setting.required, "unit": setting.unit}
                for setting in SETTINGS
            ]
        )
    else:
        rows = [(item.name, shown(redacted[item.name]), item.unit, _origin(item, getattr(settings, item.attribute))) for item in SETTINGS]
        print_table(("SETTING", "VALUE", "UNIT", "DEFAULT"), rows, no_color=ctx.obj.no_color)
    for warning in settings.warnings():
        tell(f"warning: {warning}")
    tell(f"the store is at {guard.store.address}")


def _origin(setting: Setting, value: object) -> str:
    if setting.required:
        return "required"
    return "yes" if value == setting.default else f"no, it is {shown(setting.default)}"
