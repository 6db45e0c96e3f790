"""``guard claims``: which work is queued or running, and freeing its claim by hand."""

from __future__ import annotations

import time
from typing import Any

import click

from celery_guard.cli import GuardGroup
from celery_guard.cli.command import CommandFailed, guard_command, guard_of
from celery_guard.cli.listing import json_option, list_options, selected
from celery_guard.cli.output import age, iso, print_json, print_table, printable, remaining
from celery_guard.cli.releasing import Held, release, release_options
from celery_guard.decisions import ClaimInfo, ClaimState
from celery_guard.stores.protocols import GuardStore

__all__ = ["claim_data", "claims"]

HEADINGS = ("KEY", "STATE", "TASK ID", "SINCE", "AGE", "EXPIRES IN")
RISKS = {
    ClaimState.QUEUED: "Its message stays in the queue and will run; the same work may be dispatched a second time beside it.",
    ClaimState.RUNNING: "Its run goes on; the same work may be dispatched and run a second time beside it.",
    ClaimState.DONE: "Its work is done; the same work may be dispatched again before the ttl has passed.",
}

claims = GuardGroup("claims", help="Claims: which work is queued or running, and cannot be dispatched again.")


def claim_data(info: ClaimInfo) -> dict[str, Any]:
    """A claim as JSON-able data."""
    return {
        "key": info.resource,
        "state": str(info.state),
        "task_id": info.task_id,
        "since": iso(info.since_at),
        "expires": iso(info.expires_at),
        "owner": info.owner,
    }


def _row(info: ClaimInfo, now: float) -> tuple[object, ...]:
    return (info.resource, info.state, info.task_id, iso(info.since_at), age(now - info.since_at), remaining(info.expires_at, now))


@guard_command(claims, name="list")
@list_options
def list_claims(ctx: click.Context, *, limit: int, after: str | None, task_name: str | None, match: str | None, as_json: bool) -> None:
    """List the claims, next to expire first.

    "queued" lives until its ttl, "running" on a lease that its run renews, "done" (until="expired") until its ttl.
    """
    store = guard_of(ctx).store
    found: list[ClaimInfo] = selected(store.list_claims, limit=limit, after=after, task_name=task_name, match=match)
    if as_json:
        print_json([claim_data(info) for info in found])
        return
    now = time.time()
    print_table(HEADINGS, [_row(info, now) for info in found], no_color=ctx.obj.no_color)


@guard_command(claims, name="show")
@click.argument("key")
@json_option
def show_claim(ctx: click.Context, *, key: str, as_json: bool) -> None:
    """Show the claim KEY, with the owner that release takes."""
    info = _held(guard_of(ctx).store, key)
    if as_json:
        print_json(claim_data(info))
        return
    print_table((*HEADINGS, "OWNER"), [(*_row(info, time.time()), info.owner)], no_color=ctx.obj.no_color)


@guard_command(claims, name="release")
@click.argument("key")
@click.option("--owner", help="Only if this owner, as show prints it, holds the claim.")
@release_options
def release_claim(ctx: click.Context, *, key: str, owner: str | None, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Free the claim KEY, so that the same work can be dispatched again.

    Only the claim that is shown is freed: if another message claimed KEY before you answered, it keeps it.
    Meant for a claim whose message is lost (a purged queue); the task of a live claim runs all the same.
    """
    store = guard_of(ctx).store
    info = _held(store, key)
    if owner not in (None, info.owner):
        raise CommandFailed(f"claim {key!r} is not held by owner {owner!r}; nothing was released. Now: {_holder(store, key)}")
    text = f"claim {key} held by task {info.task_id} ({info.state}) since {iso(info.since_at)}, owner {info.owner}"
    release(
        [Held(text, claim_data(info), lambda: store.force_release_claim(key, info.owner))],
        risk=RISKS[info.state],
        now_held=lambda: _holder(store, key),
        yes=yes,
        dry_run=dry_run,
        as_json=as_json,
    )


def _held(store: GuardStore, key: str) -> ClaimInfo:
    info = store.get_claim(key)
    if info is None:
        raise CommandFailed(f"nobody holds the claim {key!r} (guard claims list shows those that are held)")
    return info


def _holder(store: GuardStore, key: str) -> str:
    info = store.get_claim(key)
    return "nobody holds it" if info is None else printable(f"held by task {info.task_id} ({info.state}, owner {info.owner})")
