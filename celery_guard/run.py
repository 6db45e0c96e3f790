"""Run: one execution of a guarded task, which the task sees as ``self.guard``."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from celery_guard.decisions import ExtendOutcome, ExtendRequest, ExtendResult
from celery_guard.errors import LockLost
from celery_guard.guard import Guard
from celery_guard.policies.header import GuardHeader

if TYPE_CHECKING:
    from celery_guard.task import GuardedTask

__all__ = ["NO_RUN", "NoRun", "Run"]


class NoRun:
    """``self.guard`` outside of a guarded run: called directly, or applied eagerly without guard."""

    key: str | None = None
    token: str | None = None
    fence: int | None = None
    lost: bool = False
    attempt: int = 1

    def check(self) -> None:
        """Do nothing: there is no lock that could be lost."""


NO_RUN = NoRun()


class Run(NoRun):
    """One execution: its tokens, what it holds, and whether it still holds it.

    Attributes:
        key: Resource of the lock, or of the claim if the task has no lock.
        token: Random token of this execution.
        fence: Number that grows with every run of the lock, for resources that can compare it;
            None without a lock. Source: M. Kleppmann, "How to do distributed locking", 2016.
        lost: True once the lock is known to be no longer this run's.
        attempt: 1 for the first attempt, one more for each retry.
        reached_body: True once the body was called; a class's own ``__call__`` comes before it.
        successor: True once this run has dispatched the message that goes on in its place.
    """

    def __init__(self, task: GuardedTask, guard: Guard, header: GuardHeader, *, token: str, attempt: int, worker: str, started: float) -> None:
        self.header = header
        self.owner = header.owner
        self.task_id = header.task_id
        self.claim = header.claim
        self.token: str = token
        self.attempt = attempt
        self.worker = worker
        self.started = started
        self.extended = started
        overlap = task.guard_options.without_overlapping if header.lock is not None else None
        self.overlap = overlap
        self.lock = header.lock if overlap is not None else None
        self.key = self.lock or self.claim
        self.lease = overlap.lease_seconds if overlap is not None else guard.settings.lease
        self.max_hold = overlap.max_hold_seconds if overlap is not None else None
        self.limit = overlap.limit if overlap is not None else 1
        self.crash_memory = guard.settings.crash_memory if task.acks_late and guard.settings.max_crashes is not None else 0.0
        self.fence: int | None = None
        self.reached_body = False
        self.successor = False
        self._task = task
        self._guard = guard
        self._given_up = False
        self._aborted = False
        self._gate = threading.Lock()
        self._thread: int | None = None

    def check(self) -> None:
        """Raise LockLost if the lock is no longer this run's; call it before what must not overlap.

        Raises:
            LockLost: With key and token.
        """
        if self.lost:
            raise self.lock_lost()

    def lock_lost(self) -> LockLost:
        return LockLost(
            f"{self._task.name}[{self.task_id}]: the lock {self.key!r} is no longer this run's; stop, another run may hold it",
            task=self._task.name,
            key=self.key,
            token=self.token,
        )

    def unacknowledged_for(self) -> float:
        """Seconds that this worker has had the message; by its own clock, which no other's time is compared with."""
        received = self.header.received
        return 0.0 if received is None else time.monotonic() - received

    # What the heartbeat asks.

    def extend_request(self) -> ExtendRequest | None:
        if self._given_up:
            return None
        return ExtendRequest(
            owner=self.owner,
            token=self.token,
            generation=self.header.generation,
            task_id=self.task_id,
            worker=self.worker,
            lease=self.lease,
            claim=self.claim if self.header.until == "executed" and not self.successor else None,
            lock=self.lock,
            limit=self.limit,
            fence=self.fence,
            crash_memory=self.crash_memory,
        )

    def on_extended(self, result: ExtendResult) -> None:
        if result.outcome is ExtendOutcome.LOST:
            self._given_up = True
            self.on_lost("taken")
        elif self.lost:
            # It had been out of reach for a whole lease, and yet nobody came in between.
            self.lost = False
            logging.getLogger("celery_guard").warning("%s[%s]: lock %r is held again", self._task.name, self.task_id, self.key)

    def on_lost(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = True
        decision = "lock_lost" if reason == "taken" else "lock_expired"
        fields: dict[str, Any] = {"task_id": self.task_id, "key": self.claim or self.lock, "lock": self.lock, "fence": self.fence}
        held = round(time.monotonic() - self.started, 3)
        self._guard.announce(decision, self._task, level=logging.WARNING, duration=held, reason=reason, **fields)
        if self.overlap is not None and self.overlap.on_lost == "abort":
            self._abort()

    # Aborting the body from the heartbeat's thread.

    def enter_body(self) -> None:
        self._thread = threading.get_ident()

    def leave_body(self) -> None:
        with self._gate:
            if self._thread is not None and self._aborted:
                # What was not delivered yet must not strike Celery's code.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)
            self._thread = None

    def _abort(self) -> None:
        with self._gate:
            if self._thread is not None:
                self._aborted = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(LockLost))
