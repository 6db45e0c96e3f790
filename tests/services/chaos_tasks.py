"""Guarded tasks that tell what they do, to be killed, stopped and cut off from their servers.

Each takes a name for the call, a key, and the log that ``trace`` reads. With a task id that begins
with ``die-<point>-`` the process kills itself once at that point: before or after a verb of the
store (``before_begin``) or a publication (``after_send``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from celery.signals import task_postrun

from celery_guard import GuardedTask, LockLost, Unique, WithoutOverlapping
from celery_guard.dispatch import Message
from celery_guard.stores.redis import RedisStore
from tests.services.app import create_app
from tests.services.trace import note

LEASE = 3.0
DELAYS = (0.1, 0.2, 0.3, 0.5)
#: Longest time that a body waits for its file, so that no test leaves it behind.
PATIENCE = 60.0
PR_SET_PDEATHSIG = 1

app = create_app(__name__, task_acks_late=True, task_reject_on_worker_lost=True, guard_lease=LEASE, guard_sweep_interval=1.0, result_extended=True)


def guarded(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a task with one claim for each call and, unless told otherwise, one lock for each key."""
    defaults = {
        "unique": Unique(key="{call}", ttl=120),
        "without_overlapping": WithoutOverlapping(key="{key}", lease=LEASE, delay=DELAYS),
    }
    return app.task(base=GuardedTask, bind=True, **{**defaults, **options})


def _begin(self: Any, call: str, key: str, log: str) -> dict[str, Any]:
    about = {"call": call, "key": key, "token": self.guard.token or self.request.id}
    note(log, "start", **about, retries=self.request.retries, fence=self.guard.fence, redelivered=bool(self.request.delivery_info.get("redelivered")))
    return about


def _wait(self: Any, until: str, log: str, about: dict[str, Any]) -> None:
    """Wait for the file, and tell whenever the run finds that its lock is lost or is held again."""
    lost = False
    deadline = time.monotonic() + PATIENCE
    while not Path(until).exists() and time.monotonic() < deadline:
        if self.guard.lost != lost:
            lost = self.guard.lost
            note(log, "lost" if lost else "held again", **about, checked=_check(self))
        time.sleep(0.01)


def _check(self: Any) -> str | None:
    try:
        self.guard.check()
    except LockLost as exc:
        return exc.key
    return None


@guarded()
def work(self, call, key, log, seconds=0.0):
    about = _begin(self, call, key, log)
    time.sleep(seconds)
    note(log, "end", **about)
    return call


@guarded(without_overlapping=WithoutOverlapping(key="{key}", limit=2, lease=LEASE, delay=DELAYS))
def work_two(self, call, key, log, seconds=0.0):
    about = _begin(self, call, key, log)
    time.sleep(seconds)
    note(log, "end", **about)
    return call


@guarded()
def hold(self, call, key, log, until):
    about = _begin(self, call, key, log)
    _wait(self, until, log, about)
    note(log, "end", **about)
    return call


@guarded(without_overlapping=WithoutOverlapping(key="{key}", lease=LEASE, delay=DELAYS, on_lost="abort"))
def hold_or_abort(self, call, key, log, until):
    about = _begin(self, call, key, log)
    deadline = time.monotonic() + PATIENCE
    try:
        while not Path(until).exists() and time.monotonic() < deadline:  # no check() here, whose own LockLost it would be mistaken for
            time.sleep(0.01)
    except LockLost:
        note(log, "aborted", **about)
        raise
    note(log, "end", **about)


@guarded(without_overlapping=WithoutOverlapping(key="{key}", lease=LEASE, delay=DELAYS, max_hold=LEASE))
def hold_for_a_lease(self, call, key, log, until):
    about = _begin(self, call, key, log)
    _wait(self, until, log, about)
    note(log, "end", **about)


@guarded()
def outlive(self, call, key, log, until):
    """Go on when the main process is killed: on Linux Celery has its children killed with it (``set_pdeathsig``)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    about = _begin(self, call, key, log)
    _wait(self, until, log, about)
    note(log, "end", **about)
    return call


@guarded()
def keep_the_gil(self, call, key, log, seconds, until):
    """A call into C that does not let another thread run, like a regular expression or a sort."""
    about = _begin(self, call, key, log)
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    note(log, "gil released", **about)
    _wait(self, until, log, about)
    note(log, "end", **about)


@guarded()
def spin(self, call, key, log, seconds):
    """Pure Python that never waits for anything."""
    about = _begin(self, call, key, log)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    note(log, "end", **about)


@guarded()
def fork(self, call, key, log, until, grandchild_until):
    """Fork a grandchild that may outlive the body and the worker, and leaves the body by an exception."""
    about = _begin(self, call, key, log)
    if os.fork() == 0:
        os.setsid()
        _grandchildren.add(os.getpid())
        note(log, "grandchild", **about)
        deadline = time.monotonic() + PATIENCE
        while not Path(grandchild_until).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        note(log, "grandchild ends", **about)
        sys.exit()
    _wait(self, until, log, about)
    note(log, "end", **about)


_grandchildren: set[int] = set()


@task_postrun.connect
def _end_grandchild(**_: Any) -> None:
    """The guard has seen the exception; the pool's own code must not, which would report the end of the child."""
    if os.getpid() in _grandchildren:
        os._exit(0)


@guarded(max_retries=3)
def fail_first(self, call, key, log, times):
    about = _begin(self, call, key, log)
    note(log, "end", **about)
    if self.request.retries < times:
        raise self.retry(countdown=0.1)
    return self.request.retries


@guarded()
def fail(self, call, key, log, module, name):
    """Raise an exception by its name."""
    about = _begin(self, call, key, log)
    note(log, "end", **about)
    raise getattr(__import__(module, fromlist=[name]), name)("on purpose")


@guarded(without_overlapping=None, acks_late=False)
def claimed(self, call, key, log, until):
    about = _begin(self, call, key, log)
    _wait(self, until, log, about)
    note(log, "end", **about)


@app.task(bind=True)
def plain(self, call, log):
    note(log, "plain", call=call)
    return os.getpid()


# ------------------------------------------------------------------------- dying at a point


def _die_if_told(point: str, task_id: str) -> None:
    """Kill this process, once for each id."""
    folder = os.environ.get("CHAOS_DEATHS")
    if folder is None or not task_id.startswith(f"die-{point}-"):
        return
    try:
        os.close(os.open(Path(folder) / task_id, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    with suppress(KeyError):
        note(os.environ["CHAOS_LOG"], "kill", pids=[os.getpid()], point=point)
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(verb: str, call: Callable[..., Any], task_id_of: Callable[..., str]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        task_id = task_id_of(*args)
        _die_if_told(f"before_{verb}", task_id)
        result = call(*args, **kwargs)
        _die_if_told(f"after_{verb}", task_id)
        return result

    return wrapped


def _current_task_id(*_: Any) -> str:
    task = app.current_worker_task
    return str(task.request.id) if task is not None else ""


if "CHAOS_DEATHS" in os.environ:
    store: Any = RedisStore
    message: Any = Message
    store.begin = _dying("begin", store.begin, lambda _, request: request.task_id)
    store.end = _dying("end", store.end, _current_task_id)
    message.send = _dying("send", message.send, lambda message, *_: message.options["task_id"])
