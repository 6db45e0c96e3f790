"""Values that travel between the layers: what is asked of a store, and what it answers.

Durations are seconds. Instants are epoch seconds and end in ``_at``. Nothing here decides anything,
and nothing here imports Celery, Redis or a clock.

Vocabulary: a *resource* is the scoped key of what is guarded (``"shop.rebuild:product:42"``); an
*owner* is the random token of one dispatched message; a *token* is the random token of one
execution; a *generation* counts the messages that followed each other under one owner (a retry or
a postponement is the next generation, a copy made by the broker is not).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

__all__ = [
    "BeginOutcome",
    "BeginRequest",
    "BeginResult",
    "ClaimAction",
    "ClaimInfo",
    "ClaimOutcome",
    "ClaimRequest",
    "ClaimResult",
    "ClaimState",
    "EndRequest",
    "EndResult",
    "ExtendOutcome",
    "ExtendRequest",
    "ExtendResult",
    "Holder",
    "LockInfo",
    "ServerFacts",
    "Until",
]

Until = Literal["executed", "executing", "expired"]


class ClaimState(StrEnum):
    """Where the message that holds a claim is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"  # only with until="expired": ended, the claim lives on until its ttl


# --------------------------------------------------------------------------------- claim


class ClaimOutcome(StrEnum):
    CLAIMED = "claimed"  # it was free
    OWN = "own"  # this owner holds it already: a retry, a redelivery, a replay
    HELD = "held"  # another owner holds it


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Take or renew the claim of ``resource`` for ``owner``; the claim becomes QUEUED.

    ``ttl`` is how long the claim lives, delay until the ETA included (seconds, > 0).
    An owner that holds the claim already renews it.
    """

    resource: str
    owner: str
    task_id: str
    ttl: float


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """Answer to a ClaimRequest; the holder's data is None unless ``outcome`` is HELD."""

    outcome: ClaimOutcome
    holder_task_id: str | None = None
    holder_state: ClaimState | None = None
    holder_age: float | None = None


# --------------------------------------------------------------------------------- begin


class BeginOutcome(StrEnum):
    RUN = "run"  # granted
    DUPLICATE = "duplicate"  # another owner claims the resource, and this message must not run beside it
    BUSY = "busy"  # every slot of the lock is taken
    COPY_RUNNING = "copy_running"  # another delivery of this very message is running; it has been marked
    COPY_FINISHED = "copy_finished"  # another delivery of this very message ran to its end
    PREDECESSOR_RUNNING = "predecessor_running"  # the run that sent this retry has not ended yet
    STALE = "stale"  # a later generation of this message is running: this copy is history
    POISON = "poison"  # runs of this message began and never ended, too often


@dataclass(frozen=True, slots=True)
class BeginRequest:
    """Ask for permission to run one delivery: all or nothing, in one round trip.

    Attributes:
        owner, token, generation, task_id: Who asks.
        worker: Name of the worker and pid, for people ("celery@host:1234").
        lease: Seconds that claim, slot and run record live without a heartbeat.
        claim: Resource of the claim, or None for a task without ``unique``.
        until: When the claim is to be freed.
        claim_ttl: TTL that the claim gets when it stays (or goes back to) QUEUED because the
            request was refused, the expected delay included.
        contender: True for a message that was sent without a claim (by name, from a process that
            does not know the task): it is refused as DUPLICATE while another owner holds the claim.
            False for a message that has, or had, a claim: it runs in any case.
        lock: Resource of the execution lock, or None for a task without ``without_overlapping``.
        limit: Number of slots of the lock.
        max_crashes: Refuse as POISON once this many runs of the message began and never ended
            (None: do not count).
        crash_memory: How long begun and never ended runs are remembered (seconds).
    """

    owner: str
    token: str
    generation: int
    task_id: str
    worker: str
    lease: float
    claim: str | None = None
    until: Until = "executed"
    claim_ttl: float = 3600.0
    contender: bool = False
    lock: str | None = None
    limit: int = 1
    max_crashes: int | None = None
    crash_memory: float = 86400.0


@dataclass(frozen=True, slots=True)
class Holder:
    """One execution that holds a slot."""

    token: str
    task_id: str
    worker: str
    since_at: float
    expires_at: float
    fence: int


@dataclass(frozen=True, slots=True)
class BeginResult:
    """Answer to a BeginRequest.

    Attributes:
        outcome: What to do.
        fence: Fencing number of the granted slot, strictly growing per lock; None without a lock.
        claim_lost: Granted (or postponed) although the claim had expired or belongs to another by
            now; counted as ``claim_expired_before_start``.
        holder_task_id: Task in the way (of the claim when DUPLICATE, of a slot when BUSY).
        holder_state: State of the claim in the way, when DUPLICATE.
        retry_in: Seconds until what is in the way expires at the latest, when it is known.
        crashes: Runs of this message that began and never ended, this one not counted.
        now_at: The store's time when BUSY, the one clock that all workers share; else None.
    """

    outcome: BeginOutcome
    fence: int | None = None
    claim_lost: bool = False
    holder_task_id: str | None = None
    holder_state: ClaimState | None = None
    retry_in: float | None = None
    crashes: int = 0
    now_at: float | None = None


# --------------------------------------------------------------------------------- end


class ClaimAction(StrEnum):
    """What becomes of the claim when a run ends."""

    RELEASE = "release"  # over for good: free it (until="expired": mark it DONE, keep its ttl)
    KEEP = "keep"  # a successor was dispatched and renewed the claim: leave it alone
    REQUEUE = "requeue"  # this very message goes back to the broker: QUEUED again, with claim_ttl


@dataclass(frozen=True, slots=True)
class EndRequest:
    """Give back what a run holds. Idempotent, and only ever acts on what carries its own tokens.

    Attributes:
        owner, token, generation: Who ends. Slot and run record are given back by ``token``, the claim by ``owner``.
            ``token`` may be None where no run began (revoked or expired in the queue).
        claim, until, claim_action, claim_ttl: The claim, and what becomes of it.
        lock: Resource of the lock, or None.
        crashed: True when somebody else ends the run of a dead process: the run record is kept so
            that the crash counts (``BeginRequest.max_crashes``).
        finished_ttl: How long a finished marker lives (seconds) that makes later copies of the
            message end as COPY_FINISHED.
        copies_expected: Write the finished marker even if no copy showed up during the run.
            Never written with REQUEUE or ``crashed``.
        task_id: Metadata of a claim that REQUEUE takes because it was missing.
    """

    owner: str
    token: str | None
    generation: int = 0
    claim: str | None = None
    until: Until = "executed"
    claim_action: ClaimAction = ClaimAction.RELEASE
    claim_ttl: float = 3600.0
    lock: str | None = None
    crashed: bool = False
    finished_ttl: float = 3600.0
    copies_expected: bool = False
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class EndResult:
    """What an EndRequest changed: all False when it had been done before."""

    slot_released: bool = False
    claim_released: bool = False
    copy_seen: bool = False


# --------------------------------------------------------------------------------- extend


class ExtendOutcome(StrEnum):
    HELD = "held"  # all extended
    RETAKEN = "retaken"  # it had lapsed or the server lost it, nobody came in between: taken again
    LOST = "lost"  # another holds it, or an operator took it away


@dataclass(frozen=True, slots=True)
class ExtendRequest:
    """Extend what one run holds by ``lease`` from now. The fields are those of its BeginRequest.

    ``claim`` is None where the claim does not live on a lease (until="executing" or "expired").
    ``fence`` is the number that begin granted: a lock of limit 1 is only taken again after a lapse
    when no other number was granted since.
    """

    owner: str
    token: str
    generation: int
    task_id: str
    worker: str
    lease: float
    claim: str | None = None
    lock: str | None = None
    limit: int = 1
    fence: int | None = None
    crash_memory: float = 0.0


@dataclass(frozen=True, slots=True)
class ExtendResult:
    outcome: ExtendOutcome
    claim_lost: bool = False


# --------------------------------------------------------------------------------- for people


@dataclass(frozen=True, slots=True)
class ClaimInfo:
    """A claim, for lists."""

    resource: str
    owner: str
    task_id: str
    state: ClaimState
    since_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A lock that somebody holds, for lists."""

    resource: str
    holders: tuple[Holder, ...] = ()
    fence: int | None = None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the start-up checks learn of the server; None where the server does not tell."""

    kind: str = "memory"
    version: str | None = None
    maxmemory_policy: str | None = None
    maxmemory: int | None = None
    cluster: bool | None = None
    extra: dict[str, str] = field(default_factory=dict)
