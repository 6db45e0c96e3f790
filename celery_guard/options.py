"""What users write on a task: frozen, validated dataclasses, and their shorthands.

The constructors never raise: they collect what is wrong in ``problems``. ``resolve`` turns the
attributes of a task into ``GuardOptions`` when the task is bound, where its name is known, and
raises one ``ConfigurationError`` with every problem of the task. Durations are seconds (float) or
``timedelta``. This module imports no Celery, Redis or clock.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

from celery_guard.decisions import Until
from celery_guard.errors import ConfigurationError
from celery_guard.validation import MAX_DURATION, Duration, Option, Problems, collecting, seconds, shown

__all__ = [
    "LATER_NAMES",
    "MAX_DURATION",
    "MIN_LEASE",
    "OPTION_NAMES",
    "Backoff",
    "Duration",
    "GuardOptions",
    "KeySpec",
    "Unique",
    "WithoutOverlapping",
    "resolve",
    "seconds",
    "shown",
]

#: A template over argument names, a sequence of argument names, a callable, or None: all arguments.
KeySpec = str | Sequence[str] | Callable[..., Any] | None

#: Shortest lease in seconds: a third of it is the time between two heartbeats.
MIN_LEASE = 3.0
#: Largest jitter: a delay is drawn from [delay * (1 - jitter), delay * (1 + jitter)).
MAX_JITTER = 1.0
#: A claim or lease (seconds) above these is allowed, but more often a slip of the unit.
LONG_TTL = 86400.0
LONG_LEASE = 3600.0


def _frozen_key(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


@collecting()
@dataclass(frozen=True, slots=True, repr=False)
class Backoff(Option):
    """Delays by attempt: the first stage for the first, the last stage for all that follow.

    There is no hidden upper limit: ``Backoff([3600, 7200])`` waits an hour, then two.

    Args:
        stages: Delays in seconds, at least one, none negative; one number is one stage.
        jitter: Fraction of the delay by which it is spread both ways, 0 to 1.
    """

    stages: Sequence[Duration] | Duration = (1.0, 2.0, 5.0, 10.0, 30.0)
    jitter: float = 0.2

    def __post_init__(self) -> None:
        problems = Problems("Backoff")
        stages: Any = self.stages
        jitter: Any = self.jitter
        delays: tuple[float | None, ...] = ()
        if isinstance(stages, int | float | timedelta) and not isinstance(stages, bool):
            stages = (stages,)
        if isinstance(stages, str | bytes) or not isinstance(stages, Sequence) or not stages:
            problems.note("stages", stages, "must be a list of at least one delay, for example [5, 15, 60]")
        else:
            delays = tuple(problems.duration("stages", stage, at_least=0) for stage in stages)
        if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= MAX_JITTER:
            problems.note("jitter", jitter, "must be a fraction from 0 to 1")
        self.settle(problems, stages=None if None in delays else delays or None)

    @property
    def delays(self) -> tuple[float, ...]:
        """The stages in seconds."""
        stages = self.stages if isinstance(self.stages, Sequence) else (self.stages,)
        return tuple(seconds(stage) for stage in stages)


@collecting(later=("debounce", "max_wait"))
@dataclass(frozen=True, slots=True, repr=False)
class Unique(Option):
    """Unique dispatch: identical work is not queued twice.

    Args:
        key: What makes two calls identical (see ``KeySpec``); None: all arguments.
        until: When the claim is freed: ``"executed"`` (the run ended for good), ``"executing"``
            (the body is about to start) or ``"expired"`` (only by ``ttl``).
        ttl: Seconds that a claim lives while its message waits; the delay until an ETA is added.
        on_conflict: What a duplicate dispatch does: ``"skip"`` returns the holder's result,
            ``"raise"`` raises DuplicateTask.
        shared: True: the key is not scoped to the task's name, so several tasks share it.
    """

    key: KeySpec = None
    until: Until = "executed"
    ttl: Duration = 3600.0
    on_conflict: Literal["skip", "raise"] = "skip"
    shared: bool = False

    def __post_init__(self) -> None:
        problems = Problems("Unique")
        problems.key(self.key)
        problems.one_of("until", self.until, ("executed", "executing", "expired"))
        problems.one_of("on_conflict", self.on_conflict, ("skip", "raise"), later=("replace", "rerun", "join"))
        ttl = problems.duration("ttl", self.ttl, above=0)
        problems.boolean("shared", self.shared)
        self.settle(problems, ttl=ttl, key=_frozen_key(self.key))

    @property
    def ttl_seconds(self) -> float:
        """``ttl`` in seconds."""
        return seconds(self.ttl)

    def warnings(self) -> list[str]:
        """What is allowed, but more often a mistake than meant; for an option without problems."""
        if self.ttl_seconds > LONG_TTL:
            return [f"Unique.ttl={self.ttl_seconds:g}: is longer than 24 hours, and a lost message blocks its key for so long; ttl is in seconds"]
        return []


@collecting(later=("wait_for",))
@dataclass(frozen=True, slots=True, repr=False)
class WithoutOverlapping(Option):
    """Execution lock: the same resource is not worked on by more than ``limit`` runs at once.

    Args:
        key: What is locked (see ``KeySpec``); None: all arguments.
        limit: Number of slots, at least 1.
        lease: Seconds that a slot lives without a heartbeat, at least 3. The heartbeat renews it
            every third of that for as long as the process that runs the body lives.
        max_hold: Seconds after which the slot is no longer renewed; None: never.
        on_conflict: What a run does that finds no free slot: ``"requeue"`` postpones it without
            spending a retry, ``"skip"`` ends it as revoked, ``"raise"`` fails it with OverlapRefused.
        delay: Delays of the postponements, none of them 0.
        give_up_after: Seconds of postponing after which the task fails with PostponedTooLong;
            None: never.
        shared: True: the key is not scoped to the task's name, so several tasks share it.
        on_lost: What happens when the slot is lost during the run: ``"log"`` tells it (signal,
            log, ``self.guard.lost``), ``"abort"`` also raises LockLost in the task.
    """

    key: KeySpec = None
    limit: int = 1
    lease: Duration = 30.0
    max_hold: Duration | None = None
    on_conflict: Literal["requeue", "skip", "raise"] = "requeue"
    delay: Backoff | Sequence[Duration] | Duration = Backoff()
    give_up_after: Duration | None = None
    shared: bool = False
    on_lost: Literal["log", "abort"] = "log"

    def __post_init__(self) -> None:
        problems = Problems("WithoutOverlapping")
        problems.key(self.key)
        limit: Any = self.limit
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            problems.note("limit", limit, "must be a whole number of at least 1")
        lease = problems.duration("lease", self.lease, at_least=MIN_LEASE)
        max_hold = None if self.max_hold is None else problems.duration("max_hold", self.max_hold, above=0)
        if lease is not None and max_hold is not None and max_hold < lease:
            problems.note("max_hold", self.max_hold, f"is shorter than lease={lease:g}; raise it, or shorten the lease")
        problems.one_of("on_conflict", self.on_conflict, ("requeue", "skip", "raise"), later=("park", "wait"))
        problems.one_of("on_lost", self.on_lost, ("log", "abort"))
        give_up_after = None if self.give_up_after is None else problems.duration("give_up_after", self.give_up_after, above=0)
        problems.boolean("shared", self.shared)
        delay = self.delay if isinstance(self.delay, Backoff) else Backoff(self.delay)
        for problem in delay.problems:
            problems.append(f"WithoutOverlapping.delay: {problem}")
        if not delay.problems and 0 in delay.delays:
            problems.note("delay", self.delay, "a delay of 0 sends the message round without a pause; use at least a fraction of a second")
        self.settle(problems, lease=lease, max_hold=max_hold, give_up_after=give_up_after, delay=delay, key=_frozen_key(self.key))

    @property
    def backoff(self) -> Backoff:
        """``delay`` as a Backoff."""
        return self.delay if isinstance(self.delay, Backoff) else Backoff(self.delay)

    @property
    def lease_seconds(self) -> float:
        """``lease`` in seconds."""
        return seconds(self.lease)

    @property
    def max_hold_seconds(self) -> float | None:
        """``max_hold`` in seconds, None when the slot is renewed without end."""
        return None if self.max_hold is None else seconds(self.max_hold)

    @property
    def give_up_after_seconds(self) -> float | None:
        """``give_up_after`` in seconds, None when postponing never ends."""
        return None if self.give_up_after is None else seconds(self.give_up_after)

    def warnings(self) -> list[str]:
        """What is allowed, but more often a mistake than meant; for an option without problems."""
        found = []
        if self.lease_seconds > LONG_LEASE:
            found.append(f"WithoutOverlapping.lease={self.lease_seconds:g}: is longer than an hour, a dead worker blocks its key for so long; it is in seconds")
        limit, first = self.give_up_after_seconds, self.backoff.delays[0]
        if limit is not None and self.on_conflict != "requeue":
            found.append(f"WithoutOverlapping.give_up_after={limit:g}: has no effect with on_conflict={self.on_conflict!r}, which never postpones")
        elif limit is not None and limit < first:
            found.append(f"WithoutOverlapping.give_up_after={limit:g}: is shorter than the first delay of {first:g}, so the second attempt is the last")
        return found


#: Attributes of a task that carry an option of this version.
OPTION_NAMES = ("unique", "without_overlapping")
#: Attributes that a later version uses: silently ignoring them would leave a task unguarded.
LATER_NAMES = ("throttle", "breaker", "backoff", "once")


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """The options of one task, resolved; None where the task does not use one.

    Attributes:
        unique: Unique dispatch.
        without_overlapping: Execution lock.
        warnings: What is allowed, but more often a mistake than meant; one text each, with the task's name.
    """

    unique: Unique | None = None
    without_overlapping: WithoutOverlapping | None = None
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        return self.unique is not None or self.without_overlapping is not None


def _unique(value: Any) -> Unique | None:
    if value is None or value is False:
        return None
    if isinstance(value, Unique):
        return value
    if value is True:
        return Unique()
    if isinstance(value, int | float | timedelta):
        return Unique(ttl=value)
    if isinstance(value, str | list | tuple) or (callable(value) and not isinstance(value, type)):
        return Unique(key=value)
    raise ValueError("must be Unique(...), True, a key or a ttl in seconds")


def _without_overlapping(value: Any) -> WithoutOverlapping | None:
    if value is None or value is False:
        return None
    if isinstance(value, WithoutOverlapping):
        return value
    if value is True:
        return WithoutOverlapping()
    if isinstance(value, int):
        return WithoutOverlapping(limit=value)
    if isinstance(value, list | tuple) and any(isinstance(item, WithoutOverlapping) for item in value):
        raise ValueError("several locks on one task are not part of this version; give one WithoutOverlapping(...)")
    if isinstance(value, str | list | tuple) or (callable(value) and not isinstance(value, type)):
        return WithoutOverlapping(key=value)
    raise ValueError("must be WithoutOverlapping(...), True, a key or a number of slots")


def resolve(task: str, attributes: Mapping[str, Any], own: Iterable[str] = ()) -> GuardOptions:
    """Turn the attributes of a task into its options.

    Args:
        task: Name of the task, for messages.
        attributes: Values by name for ``OPTION_NAMES`` and ``LATER_NAMES``; absent means not used.
        own: Names of the plain-data attributes that the task's author set, to find typing errors.

    Raises:
        ConfigurationError: With every problem, each naming task, option, value and remedy.
    """
    problems: list[str] = []
    unique, problem = _parsed(_unique, "unique", attributes)
    problems += problem
    without_overlapping, problem = _parsed(_without_overlapping, "without_overlapping", attributes)
    problems += problem
    for name in LATER_NAMES:
        value = attributes.get(name)
        if value is not None and value is not False:
            problems.append(f"option {name}={shown(value)} is not part of this version; remove it, the task would run without it")
    for name in own:
        near = difflib.get_close_matches(name, OPTION_NAMES, 1, cutoff=0.8)
        if near and name not in OPTION_NAMES:
            problems.append(f"unknown option {name}={shown(attributes[name])}" if name in attributes else f"unknown option {name!r}")
            problems[-1] += f"; did you mean {near[0]!r}?"
    if problems:
        raise ConfigurationError.of([f"task {task!r}: {problem}" for problem in problems])
    warnings = [f"task {task!r}: option {text}" for option in (unique, without_overlapping) if option for text in option.warnings()]
    return GuardOptions(unique, without_overlapping, tuple(warnings))


_O = TypeVar("_O", Unique, WithoutOverlapping)


def _parsed(parse: Callable[[Any], _O | None], name: str, attributes: Mapping[str, Any]) -> tuple[_O | None, list[str]]:
    value = attributes.get(name)
    try:
        option = parse(value)
    except ValueError as exc:
        return None, [f"option {name}={shown(value)}: {exc}"]
    return option, [f"option {name}: {problem}" for problem in (option.problems if option else ())]
