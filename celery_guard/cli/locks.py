"""``guard locks``: which runs hold a slot of a lock, and taking one away by hand."""

from __future__ import annotations

import time
from typing import Any

import click

from celery_guard.cli import GuardGroup
from celery_guard.cli.command import CommandFailed, guard_command, guard_of
from celery_guard.cli.listing import json_option, list_options, selected
from celery_guard.cli.output import age, iso, print_json, print_table, printable, remaining
from celery_guard.cli.releasing import Held, release, release_options
from celery_guard.decisions import Holder, LockInfo
from celery_guard.stores.protocols import GuardStore

__all__ = ["lock_data", "locks"]

HEADINGS = ("KEY", "HOLDERS", "TASK ID", "WORKER", "SINCE", "AGE", "EXPIRES IN", "FENCE")

locks = GuardGroup("locks", help="Locks: which runs hold a slot, and keep others from running.")


def lock_data(info: LockInfo) -> dict[str, Any]:
    """A lock as JSON-able data."""
    return {"key": info.resource, "fence": info.fence, "holders": [_holder_data(holder) for holder in info.holders]}


def _holder_data(holder: Holder) -> dict[str, Any]:
    return {
        "task_id": holder.task_id,
        "worker": holder.worker,
        "since": iso(holder.since_at),
        "expires": iso(holder.expires_at),
        "fence": holder.fence,
        "token": holder.token,
    }


def _row(info: LockInfo, holder: Holder, now: float) -> tuple[object, ...]:
    since = holder.since_at
    return (info.resource, len(info.holders), holder.task_id, holder.worker, iso(since), age(now - since), remaining(holder.expires_at, now), holder.fence)


@guard_command(locks, name="list")
@list_options
def list_locks(ctx: click.Context, *, limit: int, after: str | None, task_name: str | None, match: str | None, as_json: bool) -> None:
    """List the locks that somebody holds, one line for each holder, next to expire first.

    A live run renews its lock every third of the lease, so a lock that keeps expiring soon is normal.
    """
    store = guard_of(ctx).store
    found: list[LockInfo] = selected(store.list_locks, limit=limit, after=after, task_name=task_name, match=match)
    if as_json:
        print_json([lock_data(info) for info in found])
        return
    now = time.time()
    print_table(HEADINGS, [_row(info, holder, now) for info in found for holder in info.holders], no_color=ctx.obj.no_color)


@guard_command(locks, name="show")
@click.argument("key")
@json_option
def show_lock(ctx: click.Context, *, key: str, as_json: bool) -> None:
    """Show all holders of the lock KEY, with the tokens that release takes."""
    info = _held(guard_of(ctx).store, key)
    if as_json:
        print_json(lock_data(info))
        return
    now = time.time()
    print_table((*HEADINGS, "TOKEN"), [(*_row(info, holder, now), holder.token) for holder in info.holders], no_color=ctx.obj.no_color)


@guard_command(locks, name="release")
@click.argument("key")
@click.option("--token", help="Only the slot of this token, as show prints it; without it, all slots of the lock.")
@release_options
def release_lock(ctx: click.Context, *, key: str, token: str | None, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Take the lock KEY away from its holders.

    Only who is shown loses it: if another run got the lock before you answered, it keeps it. The run that
    lost its lock goes on; it is told (lock_lost), and another one may start beside it.
    """
    store = guard_of(ctx).store
    info = _held(store, key)
    holders = [holder for holder in info.holders if token in (None, holder.token)]
    if not holders:
        raise CommandFailed(f"lock {key!r} is not held with token {token!r}; nothing was released. Now: {_holders(store, key)}")
    release(
        [_item(store, key, holder) for holder in holders],
        risk="The run goes on without its lock, and another one may start beside it.",
        now_held=lambda: _holders(store, key),
        yes=yes,
        dry_run=dry_run,
        as_json=as_json,
    )


def _held(store: GuardStore, key: str) -> LockInfo:
    info = store.get_lock(key)
    if info is None or not info.holders:
        raise CommandFailed(f"nobody holds the lock {key!r} (guard locks list shows those that are held)")
    return info


def _item(store: GuardStore, key: str, holder: Holder) -> Held:
    text = f"lock {key} held by task {holder.task_id} on {holder.worker} since {iso(holder.since_at)}, fence {holder.fence}, token {holder.token}"
    return Held(text, {"key": key, **_holder_data(holder)}, lambda: store.force_release_slot(key, holder.token))


def _holders(store: GuardStore, key: str) -> str:
    info = store.get_lock(key)
    if info is None or not info.holders:
        return "nobody holds it"
    return printable("held by " + ", ".join(f"task {holder.task_id} (token {holder.token})" for holder in info.holders))
