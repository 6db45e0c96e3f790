"""One side of the demo: a burst of jobs on real workers that get killed, counted from the outside.

The plain and the guarded side go through the same steps; they differ in nothing but the tasks' names.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis
from kombu.transport.redis import Channel

from example_app import ledger, reaper
from example_app.interrupts import Interrupts
from example_app.ledger import Run
from example_app.processes import wait_until
from example_app.services import CeleryWorker, RedisServer
from example_app.workload import LIMITS, LONG, Job

__all__ = ["CHILDREN", "LEASE", "VISIBILITY_TIMEOUT", "WORKERS", "Outcome", "Trial"]

WORKERS = 2
CHILDREN = 2
#: Seconds; those of ``example_app.tasks`` and ``guard_lease``.
LEASE = 3.0
#: Seconds until the broker gives the messages of a dead worker to another; longer than the longest job.
VISIBILITY_TIMEOUT = 5
#: Seconds between the kill of a child and that of a worker.
BETWEEN_KILLS = 1.0
#: A run is killed in this part of it: not before it is well under way, and with time left to hit it.
MIDDLE = (0.1, 0.6)
GAP = 0.01  # seconds between two dispatches
FAST_START = ["--without-heartbeat"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one side came to.

    Attributes:
        side: ``"plain"`` or ``"guarded"``.
        dispatches: Calls of ``apply_async``.
        messages: Messages that these calls put on the broker.
        postponements: Messages that workers put back for later because a lock was taken.
        runs: Runs that began.
        cut_short: Runs that a kill ended.
        overlapping: Runs that began while the key was taken.
        lost: Dispatches whose job never ran to its end.
        stuck: Claims and locks that were left one lease after the last job, by name.
        kills: What was killed, in words.
        seconds: From the first dispatch to the last end.
    """

    side: str
    dispatches: int
    messages: int
    postponements: int
    runs: int
    cut_short: int
    overlapping: int
    lost: int
    stuck: list[str]
    kills: list[str]
    seconds: float


@dataclass
class Trial:
    """One side, ready to run.

    Args:
        side: ``"plain"`` or ``"guarded"``.
        jobs: What to dispatch.
        server: An empty server of our own.
        logs: Directory for the logs of the workers and the ledger.
        kill: Whether to kill a child and a worker.
        interrupts: Where signals are held back while processes start.
        tell: Called with what is going on, the number of jobs that are done, and of how many.
    """

    side: str
    jobs: Sequence[Job]
    server: RedisServer
    logs: Path
    kill: bool
    interrupts: Interrupts
    tell: Callable[[str, int, int], None]
    workers: list[CeleryWorker] = field(default_factory=list)
    killed: dict[int, float] = field(default_factory=dict)
    kills: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.broker: Any = redis.Redis.from_url(self.server.url(0))  # redis-py's types know no pipeline from its client

    @property
    def log(self) -> Path:
        return self.logs / f"{self.side}-ledger.jsonl"

    @property
    def patience(self) -> float:
        """Seconds after which what is not done counts as lost: many times what the work takes."""
        return 30.0 + 0.4 * len(self.jobs)

    def run(self) -> Outcome:
        """Go through all steps; the workers are gone afterwards, whatever happens.

        Raises:
            RuntimeError: A worker does not start.
            TimeoutError: It does not get ready.
        """
        os.environ["EXAMPLE_LOG"] = str(self.log)
        with ExitStack() as stack:
            stack.callback(self.broker.close)
            self.tell("starting workers", 0, 0)
            for _ in range(WORKERS):
                self._start_worker(stack)
            for worker in self.workers:
                worker.wait_ready()
            began = ledger.now()
            first = len(self.jobs) // 4
            self._dispatch(self.jobs[:first])
            if self.kill:
                self._kill_child()
            self._dispatch(self.jobs[first:])
            if self.kill:
                self._watch(BETWEEN_KILLS)
                self._kill_worker(stack)
            self._watch(self.patience)
            self.tell("waiting one lease for what is left", len(self._done()), len(set(self.ids)))
            time.sleep(LEASE + 0.5)
            return self._count(began)

    def _start_worker(self, stack: ExitStack) -> None:
        number = len(self.workers) + 1
        log = self.logs / f"{self.side}-worker{number}.log"
        worker = CeleryWorker("example_app", log, concurrency=CHILDREN, hostname=f"{self.side}{number}@demo", arguments=FAST_START)
        with self.interrupts.held_back():
            stack.enter_context(worker)
        self.workers.append(worker)

    # ---------------------------------------------------------------------------------- steps

    def _dispatch(self, jobs: Sequence[Job]) -> None:
        from example_app import tasks

        prefix = "plain_" if self.side == "plain" else ""
        for number, job in enumerate(jobs):
            if number % 10 == 0:
                self.tell(f"dispatching {len(self.jobs)} jobs", len(self._done()), len(self.jobs))
            task: Any = getattr(tasks, prefix + job.name)
            self.ids.append(task.delay(*job.args).id)
            time.sleep(GAP)

    def _kill_child(self) -> None:
        while (victim := self._victim()) is not None:
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
            self.killed[victim.pid] = ledger.now()
            wait_until(partial(_is_gone, victim.pid), 10, "the killed child is gone")
            if self._was_cut_short(victim):
                self._tell_kill("a worker child", victim)
                return

    def _kill_worker(self, stack: ExitStack) -> None:
        while (victim := self._victim()) is not None:
            worker = next(worker for worker in self.workers if worker.pid == victim.parent)
            pids = [worker.pid, *worker.child_pids()]
            worker.kill(signal.SIGSTOP)
            if self._in_transit():
                worker.kill(signal.SIGCONT)
                time.sleep(0.05)
                continue
            worker.kill(group=True)
            self.killed.update(dict.fromkeys(pids, ledger.now()))
            worker.wait()
            if not hasattr(Channel, "unacked_restore_interval"):
                # kombu before 5.7 looks for a dead worker's messages when a worker starts, and then not for 100 s.
                self._watch(VISIBILITY_TIMEOUT + 1)
            self._start_worker(stack)  # as a supervisor would
            if self._was_cut_short(victim):
                self._tell_kill("a whole worker", victim)
                return

    def _in_transit(self) -> set[str]:
        """Tell which waiting jobs are in no list of the broker: popped by a worker that has not noted them yet.

        kombu's Redis transport pops a message first and notes it as unacknowledged later; when the prefetch
        count went down meanwhile, not before the worker has room again (kombu/transport/redis.py, on_readable
        and QoS.append, 5.4 to 5.7). A worker that is killed in between loses the message, guard or no guard.
        That is the transport's gap; the demo keeps out of it.
        """
        lines = ledger.entries(self.log)
        waiting = {line["id"] for line in lines if line["what"] == "sent"} - self._done()
        with self.broker.pipeline(transaction=True) as pipe:
            queued, unacked = pipe.lrange("celery", 0, -1).hvals("unacked").execute()
        held = b"\n".join([*queued, *unacked])
        return {task_id for task_id in waiting if task_id.encode() not in held}

    def _victim(self) -> Run | None:
        """Wait for a long run to be in its middle; None if there is none any more."""
        living = {worker.pid for worker in self.workers if worker.running}

        def look() -> bool:
            for item in self._runs():
                in_the_middle = MIDDLE[0] * item.seconds < ledger.now() - item.started < MIDDLE[1] * item.seconds
                if item.task.endswith(LONG) and item.ended is None and item.pid not in self.killed and item.parent in living and in_the_middle:
                    found.append(item)
            return bool(found) or self._is_all_done()

        found: list[Run] = []
        with suppress(TimeoutError):
            wait_until(look, self.patience)
        return found[0] if found else None

    def _was_cut_short(self, victim: Run) -> bool:
        return any(item.pid == victim.pid and item.started == victim.started and item.ended is None for item in self._runs())

    def _tell_kill(self, what: str, victim: Run) -> None:
        after = self.killed[victim.pid] - victim.started
        text = f"{what} {after:.1f} s into a job of {victim.seconds:g} s"
        self.kills.append(text)
        self.tell(f"SIGKILL to {text}", len(self._done()), len(set(self.ids)))

    def _watch(self, seconds: float) -> None:
        """Show the progress until everything is done, for ``seconds`` at most."""
        wanted = set(self.ids)
        deadline = ledger.now() + seconds
        while ledger.now() < deadline and not self._is_all_done():
            self.tell("working", len(self._done() & wanted), len(wanted))
            time.sleep(0.2)

    def _is_all_done(self) -> bool:
        with self.broker.pipeline(transaction=True) as pipe:
            left: int = sum(pipe.llen("celery").hlen("unacked").execute())
        return not left and set(self.ids) <= self._done()

    # ----------------------------------------------------------------------------------- counts

    def _runs(self) -> list[Run]:
        return ledger.runs(ledger.entries(self.log))

    def _done(self) -> set[str]:
        return {item.task_id for item in self._runs() if item.ended is not None}

    def _count(self, began: float) -> Outcome:
        lines = ledger.entries(self.log)
        runs = ledger.runs(lines)
        sent = [line["pid"] for line in lines if line["what"] == "sent"]
        done = self._done()
        limits = {f"example_app.tasks.{prefix}{name}": limit for name, limit in LIMITS.items() for prefix in ("", "plain_")}
        return Outcome(
            side=self.side,
            dispatches=len(self.ids),
            messages=sent.count(os.getpid()),
            postponements=len(sent) - sent.count(os.getpid()),
            runs=len(runs),
            cut_short=sum(item.ended is None for item in runs),
            overlapping=ledger.count_overlaps(runs, limits, self.killed),
            lost=sum(task_id not in done for task_id in self.ids),
            stuck=_held(),
            kills=self.kills,
            seconds=max((item.ended for item in runs if item.ended is not None), default=began) - began,
        )


def _is_gone(pid: int) -> bool:
    return reaper.start_time(pid) is None


def _held() -> list[str]:
    """What the lock store still holds; the plain side never puts anything there."""
    from celery_guard import Guard
    from example_app.celery_app import app

    store = Guard(app).store
    claims = [f"claim {claim.resource} ({claim.state})" for claim in store.list_claims()]
    return claims + [f"lock {lock.resource}" for lock in store.list_locks()]
