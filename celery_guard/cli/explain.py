"""``guard explain``: what a call of a task is guarded by, who is in the way, what would happen now."""

from __future__ import annotations

import difflib
import inspect
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import click

from celery_guard.cli.claims import claim_data
from celery_guard.cli.command import NotUsable, StoreAway, guard_command, guard_of
from celery_guard.cli.listing import json_option
from celery_guard.cli.locks import lock_data
from celery_guard.cli.output import age, print_json, printable, remaining
from celery_guard.decisions import ClaimInfo, LockInfo
from celery_guard.errors import StoreUnavailable
from celery_guard.guard import Guard
from celery_guard.keys import canonical_arguments, redis_key
from celery_guard.options import Backoff, Unique, WithoutOverlapping
from celery_guard.policies.overlap import Postpone, Skip, on_busy
from celery_guard.policies.unique import Conflict, resolve_conflict
from celery_guard.task import GuardedTask

__all__ = ["explain"]

LOCK_KINDS = ("slots", "holders", "fence")


@guard_command()
@click.argument("task")
@click.argument("arguments", nargs=-1, metavar="[ARGS]...")
@click.option("--kwargs", "kwargs_json", metavar="JSON", help="Keyword arguments as a JSON object.")
@json_option
def explain(ctx: click.Context, *, task: str, arguments: tuple[str, ...], kwargs_json: str | None, as_json: bool) -> None:
    """Explain what guards the call TASK ARGS, and what would happen if it was made now.

    Each of ARGS is JSON (42, '"text"', '[1, 2]'), or name=JSON for a keyword argument; what is not JSON is
    taken as text. Write -- before TASK if an argument begins with a dash. Nothing is sent and nothing is changed.
    """
    guard = guard_of(ctx)
    found = _task(ctx, task)
    args, kwargs = _arguments(arguments, kwargs_json)
    explanation: dict[str, Any] = {"task": found.name, "guarded": False}
    failure: StoreUnavailable | None = None
    if isinstance(found, GuardedTask) and found.guard_options:
        explanation["guarded"] = True
        # Derived first: without a key there is nothing to tell, and the error says why.
        keys = found.claim_key(args, kwargs), found.lock_key(args, kwargs)
        explanation["arguments"] = canonical_arguments(inspect.signature(found.run), args, kwargs)
        explanation["store"] = guard.store.address
        failure = _explain_options(explanation, guard, found, *keys)
    else:
        base = "its options unique and without_overlapping are not set" if isinstance(found, GuardedTask) else "its base class is not GuardedTask"
        explanation["reason"] = f"not guarded: {base}"
    if as_json:
        print_json(explanation)
    else:
        for line in _lines(explanation):
            click.echo(printable(line))
    if failure is not None:
        raise StoreAway(failure.message)


def _task(ctx: click.Context, name: str) -> Any:
    app = ctx.obj.app
    app.loader.import_default_modules()
    app.finalize()
    if name in app.tasks:
        return app.tasks[name]
    known = sorted(known for known in app.tasks if not known.startswith("celery."))
    near = difflib.get_close_matches(name, known, 1) or [full for full in known if full.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif known:
        hint = f"this app knows: {', '.join(known[:20])}{' ...' if len(known) > 20 else ''}"
    else:
        hint = "this app knows no tasks; does celery -A name the right app, and does the app import its tasks (include, autodiscover_tasks)?"
    raise NotUsable(f"no task {name!r}; {hint}")


def _arguments(words: Sequence[str], kwargs_json: str | None) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    if kwargs_json is not None:
        try:
            kwargs = json.loads(kwargs_json)
        except ValueError as exc:
            raise click.BadParameter(f"is not JSON: {exc}", param_hint="--kwargs") from exc
        if not isinstance(kwargs, dict):
            raise click.BadParameter("""must be a JSON object, for example '{"product_id": 42}'""", param_hint="--kwargs")
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            args.append(_value(word))
        elif name in kwargs:
            raise click.UsageError(f"argument {name!r} is given twice")
        else:
            kwargs[name] = _value(text)
    return args, kwargs


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _explain_options(explanation: dict[str, Any], guard: Guard, task: GuardedTask, claim: str | None, lock: str | None) -> StoreUnavailable | None:
    """Add what each option of the task means for this call; returns the error if the store could not be asked."""
    unique, overlap, prefix = task.guard_options.unique, task.guard_options.without_overlapping, guard.settings.key_prefix
    failure: StoreUnavailable | None = None
    if unique is not None and claim is not None:
        part: dict[str, Any] = {"options": _options(unique), "key": claim, "redis_keys": [redis_key(prefix, claim, "claim")]}
        explanation["unique"] = part
        try:
            claimed = guard.store.get_claim(claim)
            part.update(claim=claimed and claim_data(claimed), if_dispatched_now=_if_dispatched(unique, claimed))
        except StoreUnavailable as exc:
            failure = exc
    if overlap is not None and lock is not None:
        part = {"options": _options(overlap), "key": lock, "redis_keys": [redis_key(prefix, lock, kind) for kind in LOCK_KINDS]}
        explanation["without_overlapping"] = part
        if failure is not None:
            return failure
        try:
            locked = guard.store.get_lock(lock)
            part.update(lock=locked and lock_data(locked), if_started_now=_if_started(overlap, locked))
        except StoreUnavailable as exc:
            failure = exc
    return failure


def _options(option: Unique | WithoutOverlapping) -> dict[str, Any]:
    return {item.name: _option_value(item.name, getattr(option, item.name)) for item in fields(option) if item.init}


def _option_value(name: str, value: Any) -> Any:
    if name == "key" and value is None:
        return "all arguments"
    if isinstance(value, Backoff):
        return {"stages": list(value.delays), "jitter": value.jitter}
    if callable(value):
        return f"function {getattr(value, '__qualname__', type(value).__qualname__)}"
    return list(value) if isinstance(value, tuple) else value


def _if_dispatched(unique: Unique, claim: ClaimInfo | None) -> str:
    if claim is None:
        return f"it would be sent, and claim the key (for {age(unique.ttl_seconds)} while it waits)"
    now = time.time()
    held = f"task {claim.task_id} has claimed the key for {age(now - claim.since_at)} ({claim.state}, expires in {remaining(claim.expires_at, now)})"
    if resolve_conflict(unique.on_conflict, continuation=False) is Conflict.RAISE:
        return f"{held}: DuplicateTask would be raised"
    return f"{held}: nothing would be sent, and the result of that task be returned; with callbacks, or as part of a workflow, it would be sent without a claim"


def _if_started(overlap: WithoutOverlapping, lock: LockInfo | None) -> str:
    taken = len(lock.holders) if lock is not None else 0
    if lock is None or taken < overlap.limit:
        return f"it would run: {taken} of {overlap.limit} slots taken"
    held = f"{taken} of {overlap.limit} slots taken, by {', '.join(f'task {holder.task_id} on {holder.worker}' for holder in lock.holders)}"
    # The middle of the jitter band.
    refusal = on_busy(overlap, postponed=0, waited=0.0, u=0.5, ceiling=None)
    if isinstance(refusal, Postpone):
        return f"{held}: it would be postponed, first by about {refusal.delay:g} s"
    return f"{held}: it would end as REVOKED without running" if isinstance(refusal, Skip) else f"{held}: it would fail with OverlapRefused"


# ------------------------------------------------------------------------------------ text


def _lines(explanation: Mapping[str, Any]) -> list[str]:
    if not explanation["guarded"]:
        return [f"{explanation['task']}: {explanation['reason']}"]
    lines = [f"{explanation['task']}: guarded, store {explanation['store']}", "arguments:"]
    lines += [f"  {name} = {_text(value)}" for name, value in explanation["arguments"].items()] or ["  none"]
    for option, asked, verb in (("unique", "if_dispatched_now", "if dispatched now"), ("without_overlapping", "if_started_now", "if started now")):
        if option not in explanation:
            lines.append(f"{option}: not used")
            continue
        part = explanation[option]
        lines.append(f"{option}:")
        lines += [f"  {'made of' if name == 'key' else name} = {_text(value)}" for name, value in part["options"].items()]
        lines.append(f"  key: {part['key']}")
        lines += [f"  in Redis: {name}" for name in part["redis_keys"]]
        lines.append(f"  {verb}: {part.get(asked, 'unknown, the store could not be asked')}")
    return lines


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
