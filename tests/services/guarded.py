"""Tasks under every guard, with one body that does what its argument says and notes each step in a file.

What is counted in tests is counted from that file: a line is one write at its end, so that lines of
many processes do not mix, and a process that is killed leaves what it had written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Any

from celery import chord, signature
from celery.exceptions import Ignore, Reject

from celery_guard import GuardedTask, Unique, WithoutOverlapping
from tests.services.app import create_app

LEASE = 3
#: Seconds after which the main process knows that a child took the job; one that dies before is replaced without a word.
ACCEPTED = 0.3

app = create_app(
    __name__,
    guard_lease=LEASE,
    accept_content=["json", "pickle"],
    task_reject_on_worker_lost=None,
    worker_cancel_long_running_tasks_on_connection_loss=False,
)
#: Directory of the log and of the files that let held tasks go; the test's and the worker's are the same.
DIRECTORY = Path(app.conf.get("test_directory") or ".")


class Flaky(Exception):
    """What the tasks retry for on their own."""


class Colour(Enum):
    RED = "red"


def note(what: str, label: Any, **data: Any) -> None:
    """Append one line to the log."""
    line = json.dumps({"what": what, "label": str(label), "pid": os.getpid(), "ppid": os.getppid(), "at": time.time(), **data}, default=str)
    log = os.open(DIRECTORY / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(log, f"{line}\n".encode())
    finally:
        os.close(log)


def face(request: Any) -> dict[str, Any]:
    """What a message looked like to its task, without what differs from run to run."""
    names = ("retries", "argsrepr", "kwargsrepr", "compression", "shadow", "stamps", "stamped_headers", "timelimit", "ignore_result", "origin", "reply_to")
    seen = {name: getattr(request, name, None) for name in names}
    info = request.delivery_info or {}
    local = getattr(request, "guard", None) or {}
    custom = {name: value for name, value in (request.headers or {}).items() if name != "guard"}
    return {**seen, "queue": info.get("routing_key"), "priority": info.get("priority"), "content_type": local.get("content_type"), "headers": custom}


def hold(label: Any, limit: float = 60.0) -> None:
    """Go on when the file ``<label>.go`` exists."""
    deadline = time.monotonic() + limit
    while not (DIRECTORY / f"{label}.go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


class Base(GuardedTask):
    """Fails before its body if asked to."""

    abstract = True
    autoretry_for = (Flaky,)
    default_retry_delay = 0.2
    max_retries = 2
    retry_jitter = False

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        if "before_start" in (kwargs.get("how"), *args[1:2]):
            raise RuntimeError("before_start")


def act(self: Any, label: str, how: str = "ok", extra: Any = None) -> str:
    """Do ``how``, and note when it begins and ends."""
    guard = self.guard
    note("start", label, id=self.request.id, retries=self.request.retries, task=self.name, fence=guard.fence, face=face(self.request))
    try:
        return _act(self, label, how, extra)
    finally:
        # retry(max_retries=…) leaves it on the task for every later autoretry of this process (celery/app/task.py, 5.4 to 5.7).
        vars(self).pop("override_max_retries", None)
        note("end", label, id=self.request.id, task=self.name, lost=guard.lost)


def _act(self: Any, label: str, how: str, extra: Any) -> str:
    verb, _, number = how.partition(":")
    if verb == "hold":
        hold(label)
    elif verb == "sleep":
        time.sleep(float(number))
    elif verb == "error":
        raise ValueError(f"error of {label}")
    elif verb == "retry" and self.request.retries < int(number):
        raise self.retry(countdown=float(extra) if isinstance(extra, int | float) else 0.1, max_retries=10)
    elif verb == "exhaust":
        raise self.retry(countdown=0.1, max_retries=1)
    elif verb == "flaky" and self.request.retries < int(number):
        raise Flaky(label)
    elif verb == "ignore":
        raise Ignore
    elif verb == "reject":
        raise Reject("no", requeue=False)
    elif verb == "requeue" and once(label):
        raise Reject("again", requeue=True)
    elif verb == "replace":
        raise self.replace(_replacement(self, label, number))
    elif verb == "exit":
        time.sleep(ACCEPTED)
        sys.exit(7)
    elif verb == "kill" or (verb == "kill_once" and once(label)):
        time.sleep(ACCEPTED)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    elif verb == "copy_headers":
        return str(self.apply_async((f"{label}-other",), headers=self.request.headers).id)
    elif verb == "child":
        return str(signature(self.name, (label,), app=app).apply_async().id)
    return str(label)


def once(label: Any) -> bool:
    """True for the first caller of all processes."""
    try:
        (DIRECTORY / f"{label}.once").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _replacement(self: Any, label: str, kind: str) -> Any:
    if kind == "same":
        return self.s(label)
    if kind == "other":
        return plain.si(label)
    return chord([plain.si(label), plain.si(label)], plain.si(label))


def guarded(name: str, **options: Any) -> Any:
    """Make one task of ``act``."""
    return app.task(base=Base, bind=True, name=name, **options)(act)


def unique(until: Any = "executed", **options: Any) -> Unique:
    return Unique(**{"key": "{label}", "until": until, "ttl": 60, **options})


def lock(**options: Any) -> WithoutOverlapping:
    return WithoutOverlapping(**{"key": "{label}", "lease": LEASE, "delay": [0.2], **options})


plain = guarded("plain")
executed = guarded("executed", unique=unique())
executing = guarded("executing", unique=unique("executing"))
expired = guarded("expired", unique=unique("expired"))
locked = guarded("locked", without_overlapping=lock())
both = guarded("both", unique=unique(), without_overlapping=lock())

#: The messages of these are acknowledged after the run; a lost child sends them back.
LATE = {"acks_late": True, "reject_on_worker_lost": True}
executed_late = guarded("executed_late", unique=unique(), **LATE)
executing_late = guarded("executing_late", unique=unique("executing"), **LATE)
expired_late = guarded("expired_late", unique=unique("expired"), **LATE)
locked_late = guarded("locked_late", without_overlapping=lock(), **LATE)
both_late = guarded("both_late", unique=unique(), without_overlapping=lock(), **LATE)

both_long = guarded("both_long", unique=unique(), without_overlapping=lock(lease=30), **LATE)
only_late = guarded("only_late", unique=unique(), without_overlapping=lock(), acks_late=True)
retry_lost = guarded("retry_lost", unique=unique(), without_overlapping=lock(), retry_on_worker_lost=True)

raising = guarded("raising", unique=unique(on_conflict="raise"))
short = guarded("short", unique=unique(ttl=1))
silent = guarded("silent", unique=unique(), ignore_result=True)
all_arguments = guarded("all_arguments", unique=True)
shared_a = guarded("shared_a", unique=unique(shared=True))
shared_b = guarded("shared_b", unique=unique(shared=True))

lock_skip = guarded("lock_skip", unique=unique(), without_overlapping=lock(on_conflict="skip"))
lock_raise = guarded("lock_raise", unique=unique(), without_overlapping=lock(on_conflict="raise"))
lock_patient = guarded("lock_patient", unique=unique(), without_overlapping=lock(delay=[0.2], give_up_after=1))
lock_two = guarded("lock_two", without_overlapping=lock(limit=2))
lock_whole = guarded("lock_whole", without_overlapping=lock(key="all"), max_retries=0)
lock_slow_late = guarded("lock_slow_late", without_overlapping=lock(delay=[2]), **LATE)
lock_brief = guarded("lock_brief", without_overlapping=lock(max_hold=LEASE))
mixed = guarded("mixed", unique=unique(key="{label}:{extra}"), without_overlapping=lock())
