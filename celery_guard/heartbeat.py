"""The heartbeat: one daemon thread per process that extends every lease the process holds.

It lives in the process that runs the bodies, so a lease lives exactly as long as that process: the
lock of a killed child ends, the lock of a child whose main process was killed goes on. The thread
is started by the first run and talks to the store only while something is held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from celery_guard.decisions import ExtendOutcome, ExtendRequest, ExtendResult
from celery_guard.errors import StoreUnavailable

__all__ = ["Heartbeat", "Held"]

logger = logging.getLogger("celery_guard")

#: The lease is renewed this many times within its length, so that two renewals may fail.
RENEWALS_PER_LEASE = 3
#: Seconds after which the end of a run no longer waits for an extension of it: the store's own time-outs are shorter.
LONGEST_ROUND_TRIP = 20.0


class Held(Protocol):
    """What the heartbeat needs of a run."""

    lease: float
    max_hold: float | None
    started: float  # monotonic instant at which begin was called
    extended: float  # monotonic instant at which the last successful extension was called

    def extend_request(self) -> ExtendRequest | None:
        """The extension to ask for, or None when the run has lost its lock and wants no more."""
        ...

    def on_extended(self, result: ExtendResult) -> None: ...

    def on_lost(self, reason: str) -> None:
        """Called when the lease ended without renewal (``max_hold``, ``unreachable``)."""
        ...


class Heartbeat:
    """Extends what is held, every third of the shortest lease.

    Args:
        extend: The store's ``extend``.
        monotonic: Clock of waits and deadlines (seconds).
    """

    def __init__(self, extend: Callable[[Sequence[ExtendRequest]], list[ExtendResult]], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._extend = extend
        self._monotonic = monotonic
        self._held: dict[int, Held] = {}
        self._wake = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._next = float("inf")  # when the thread looks again; inf while it waits for a first run
        self._failures = 0
        self._extending: set[int] = set()  # ids of the runs whose extension is under way

    def add(self, run: Held) -> None:
        """Begin to extend ``run``."""
        with self._wake:
            self._held[id(run)] = run
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name="celery_guard-heartbeat", daemon=True)
                self._thread.start()
            due = self._monotonic() + run.lease / RENEWALS_PER_LEASE
            if due < self._next:
                self._next = due
                self._wake.notify_all()

    def remove(self, run: Held) -> None:
        """Stop extending ``run``: when this returns, no extension of it is under way.

        One that reached the store behind the run's end would take back what was just given back.
        Blocks for the rest of one round trip at most.
        """
        with self._wake:
            self._held.pop(id(run), None)
            self._wake.wait_for(lambda: id(run) not in self._extending, LONGEST_ROUND_TRIP)

    def __len__(self) -> int:
        return len(self._held)

    def _loop(self) -> None:
        while True:
            with self._wake:
                now = self._monotonic()
                while not self._held or now < self._next:
                    if not self._held:
                        self._next = float("inf")
                    self._wake.wait(None if self._next == float("inf") else self._next - now)
                    now = self._monotonic()
                runs = list(self._held.values())
                self._extending = set(self._held)
            try:
                self.beat(runs)
            except Exception:  # a fault here must not end the only thread that keeps locks alive
                logger.exception("celery_guard: heartbeat failed")
                self._failures += 1
            self._extended()
            with self._wake:
                shortest = min((run.lease for run in self._held.values()), default=float("inf"))
                interval = shortest / RENEWALS_PER_LEASE
                if self._failures:
                    interval = min(interval, 0.25 * 2 ** min(self._failures, 5))
                self._next = self._monotonic() + interval

    def _extended(self) -> None:
        with self._wake:
            self._extending = set()
            self._wake.notify_all()

    def beat(self, runs: Sequence[Held]) -> None:
        """Extend ``runs`` once, in one round trip, and tell each how it went."""
        now = self._monotonic()
        asked: list[tuple[Held, ExtendRequest]] = []
        for run in runs:
            if run.max_hold is not None and now - run.started >= run.max_hold:
                if now - run.extended >= run.lease:
                    run.on_lost("max_hold")
                continue
            request = run.extend_request()
            if request is not None:
                asked.append((run, request))
        if not asked:
            self._failures = 0
            return
        try:
            results = self._extend([request for _, request in asked])
        except StoreUnavailable as exc:
            self._extended()
            self._failures += 1
            logger.warning("celery_guard: heartbeat could not extend %d lease(s), trying again: %s", len(asked), exc)
            now = self._monotonic()
            for run, _ in asked:
                if now - run.extended >= run.lease:
                    run.on_lost("unreachable")
            return
        self._failures = 0
        self._extended()  # before the runs are told: a receiver of lock_lost may be slow
        for (run, _), result in zip(asked, results, strict=True):
            if result.outcome is not ExtendOutcome.LOST:
                run.extended = now
            run.on_extended(result)
