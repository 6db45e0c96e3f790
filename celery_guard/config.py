"""The ``guard_*`` settings of a Celery app: declared once, read and checked together.

The declaration is the class ``Settings``: a field ``lease`` is the setting ``guard_lease``, with its
default and, in the annotation, its type, check and description. ``SETTINGS`` is the same as a table,
for documentation and commands. This module imports no Celery and no Redis; it reads a mapping.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import FunctionType, ModuleType
from typing import Annotated, Any, Literal, get_type_hints

from celery_guard.addresses import check_backend, redact
from celery_guard.errors import ConfigurationError
from celery_guard.options import MIN_LEASE
from celery_guard.validation import listed, seconds, shown

__all__ = ["SETTINGS", "Setting", "Settings"]

PREFIX = "guard_"
#: Options of redis-py that a setting decides, or that would break the store.
RESERVED_OPTIONS = {
    "socket_timeout": "use guard_store_timeout",
    "socket_connect_timeout": "use guard_store_connect_timeout",
    "max_connections": "use guard_store_max_connections",
    "decode_responses": "the store decides it",
}
#: Settings that a later version knows begin with these words.
LATER_PREFIXES = ("guard_failed_jobs_", "guard_outbox_", "guard_cache_")


@dataclass(frozen=True, slots=True)
class Rule:
    """How one setting is described and checked.

    Attributes:
        type: Type of the value, for people.
        description: One line.
        check: Returns the normal form of a value, or raises ValueError with what is wrong and the remedy.
        unit: Unit of the value, or None.
    """

    type: str
    description: str
    check: Callable[[Any], Any]
    unit: str | None = None


def _duration(description: str, *, at_least: float | None = None) -> Rule:
    def check(value: Any) -> float:
        number = seconds(value)
        if at_least is not None and number < at_least:
            raise ValueError(f"must be at least {at_least:g} seconds")
        if number <= 0:
            raise ValueError("must be more than 0 seconds")
        return number

    return Rule("float or timedelta", description, check, "seconds")


def _whole(description: str, *, at_least: int, optional: bool = False) -> Rule:
    def check(value: Any) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ValueError(f"must be a whole number of at least {at_least}{', or None' if optional else ''}")
        return value

    return Rule("int or None" if optional else "int", description, check)


def _choice(description: str, *choices: str) -> Rule:
    def check(value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        near = difflib.get_close_matches(value, choices, 1) if isinstance(value, str) else []
        raise ValueError(f"must be one of {listed(choices)}" + (f"; did you mean {near[0]!r}?" if near else ""))

    return Rule(" or ".join(f'"{choice}"' for choice in choices), description, check)


def _boolean(description: str) -> Rule:
    def check(value: Any) -> bool:
        if value is not True and value is not False:
            raise ValueError("must be True or False; a text from the environment has to be converted, every text counts as true")
        return bool(value)

    return Rule("bool", description, check)


def _check_key_prefix(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or set(value) & set("{} ") or len(value) > 64:
        raise ValueError("must be a text of 1 to 64 characters without spaces and braces, for example 'guard'")
    return value


def _check_options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a dict of keyword arguments for redis-py, for example {'health_check_interval': 30}")
    taken = [f"{name!r} ({RESERVED_OPTIONS[name]})" for name in value if name in RESERVED_OPTIONS]
    if taken:
        raise ValueError(f"must not contain {', '.join(taken)}")
    return dict(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one app. ``from_conf`` checks them; the constructor takes checked values.

    Durations are seconds. Field ``x`` is the setting ``guard_x``.
    """

    store_backend: Annotated[
        str, Rule("str", 'Lock store: a Redis URL, "broker" or "result" (the server that Celery uses for it), or "memory" (tests).', check_backend)
    ]
    key_prefix: Annotated[str, Rule("str", "First part of every key in the store; apps with different prefixes do not see each other.", _check_key_prefix)] = (
        "guard"
    )
    store_connect_timeout: Annotated[float, _duration("Longest wait for a connection to the store.")] = 2.0
    store_timeout: Annotated[float, _duration("Longest wait for the answer to one command.")] = 5.0
    store_retries: Annotated[int, _whole("How often a command is repeated after its connection broke (never after a time-out).", at_least=0)] = 1
    store_max_connections: Annotated[int | None, _whole("Most connections to the store that one process opens; None: no limit.", at_least=1, optional=True)] = (
        None
    )
    store_transport_options: Annotated[Mapping[str, Any], Rule("dict", "More keyword arguments for the redis-py client.", _check_options)] = field(
        default_factory=dict, hash=False
    )
    on_store_error: Annotated[
        Literal["raise", "dispatch"], _choice("Dispatch while the store is down: raise StoreUnavailable, or send unguarded.", "raise", "dispatch")
    ] = "raise"
    on_store_error_at_execution: Annotated[
        Literal["requeue", "run"], _choice("Execution while the store is down: postpone the message, or run unguarded.", "requeue", "run")
    ] = "requeue"
    eager: Annotated[bool, _boolean("Guard task_always_eager and apply() too, with a store in memory.")] = False
    lease: Annotated[
        float, _duration("Life of a running claim without a heartbeat, for tasks without without_overlapping (which has its own lease).", at_least=MIN_LEASE)
    ] = 30.0
    uncertain_ttl: Annotated[float, _duration("Life of a claim whose message may or may not have reached the broker.")] = 60.0
    max_crashes: Annotated[
        int | None, _whole("Runs of one message that may die with their worker before it counts as poison; None: no limit.", at_least=1, optional=True)
    ] = 3
    crash_memory: Annotated[float, _duration("How long a run that began and never ended is remembered.")] = 86400.0
    finished_ttl: Annotated[float, _duration("How long a finished message is remembered, so that late copies of it do not run.")] = 3600.0
    sweep_interval: Annotated[float, _duration("Time between two sweeps of expired index entries by a worker.", at_least=1.0)] = 30.0
    startup_checks: Annotated[bool, _boolean("Check server, settings and options when a worker starts, and log what is doubtful.")] = True

    @classmethod
    def from_conf(cls, conf: Mapping[str, Any]) -> Settings:
        """Read the settings out of ``app.conf`` (or a plain dict).

        Raises:
            ConfigurationError: With every problem, each naming setting, value and remedy.
        """
        problems: list[str] = []
        values: dict[str, Any] = {}
        for setting in SETTINGS:
            value = conf.get(setting.name, MISSING)
            if setting.required and value in (MISSING, None, ""):
                problems.append(
                    f'setting {setting.name} is missing: write for example {setting.name} = "redis://localhost:6379/2", '
                    '"broker" or "result" to use the Redis server of the broker or of the result backend, or "memory" in tests'
                )
            elif value is not MISSING:
                try:
                    values[setting.attribute] = setting.check(value)
                except ValueError as exc:
                    problems.append(f"setting {setting.name}={shown(redact(setting.name, value))}: {exc}")
        problems += _misspelled(conf)
        if problems:
            raise ConfigurationError.of(problems)
        return cls(**values)

    def redacted(self) -> dict[str, Any]:
        """Return the values by setting name, in order, with passwords masked; for people."""
        return {setting.name: redact(setting.name, getattr(self, setting.attribute)) for setting in SETTINGS}

    def warnings(self) -> list[str]:
        """What is allowed, but more often a mistake than meant; one text each."""
        found = []
        if self.store_backend == "memory":
            found.append('guard_store_backend="memory" guards within one process only; use it for tests')
        if self.store_timeout >= self.lease:
            found.append(
                f"guard_store_timeout={self.store_timeout:g} is not shorter than guard_lease={self.lease:g}: one slow answer lets running claims lapse"
            )
        return found


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the table of settings.

    Attributes:
        name: Name in the configuration, for example ``"guard_lease"``.
        attribute: Name of the field of ``Settings``.
        type: Type of the value, for people.
        unit: Unit of the value, or None.
        default: Default; None also where the setting is required.
        required: True: there is no default.
        description: One line.
        check: Returns the normal form of a value, or raises ValueError with what is wrong and the remedy.
    """

    name: str
    attribute: str
    type: str
    unit: str | None
    default: Any
    required: bool
    description: str
    check: Callable[[Any], Any]


def _table() -> Iterator[Setting]:
    hints = get_type_hints(Settings, include_extras=True)
    for item in fields(Settings):
        rule: Rule = hints[item.name].__metadata__[0]
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        required = default is MISSING
        yield Setting(PREFIX + item.name, item.name, rule.type, rule.unit, None if required else default, required, rule.description, rule.check)


#: Every setting of this version, in the order of the documentation.
SETTINGS: tuple[Setting, ...] = tuple(_table())


def _misspelled(conf: Mapping[str, Any]) -> list[str]:
    """Find settings that look like ours and would be silently ignored.

    Celery looks a name up as it is, and behind the namespace of ``config_from_object`` in the case of
    the namespace; every other spelling is dead. When a name is set in both ways, Celery 5.4 takes the
    one with the namespace and 5.7 the one set last, so different values are a problem.
    """
    namespace: str = getattr(conf, "prefix", None) or ""
    spellings: dict[str, str] = {}
    for setting in SETTINGS:
        behind = namespace + setting.name
        spellings[setting.name] = behind.upper() if namespace.isupper() else behind.lower()
    live = {*spellings, *spellings.values()}
    problems = []
    names: list[Any] = list(conf)  # nothing keeps a configuration from having keys of other types
    for key in sorted(name for name in names if isinstance(name, str)):
        plain = _plain(key, namespace)
        if key in live or not plain.startswith(PREFIX) or isinstance(conf.get(key), FunctionType | ModuleType | type):
            continue
        near = difflib.get_close_matches(plain, spellings, 1, cutoff=0.7)
        if plain in spellings:
            problems.append(f"setting {key} is not read; write {spellings[plain]}")
        elif plain.startswith(LATER_PREFIXES):
            problems.append(f"setting {key} is not part of this version; remove it")
        elif near:
            problems.append(f"unknown setting {key}; did you mean {spellings[near[0]]}?")
        elif not namespace or key.islower() or key.startswith(namespace):
            # With a namespace, GUARD_… in a shared settings module may belong to somebody else.
            problems.append(f"unknown setting {key}; remove it, or see the list of guard_* settings")
    return problems + _set_twice(conf, spellings)


def _set_twice(conf: Mapping[str, Any], spellings: Mapping[str, str]) -> list[str]:
    maps: Sequence[Mapping[str, Any]] = getattr(conf, "maps", [conf])
    problems = []
    for name, spelled in spellings.items():
        plain, behind = (next((mapping[key] for mapping in maps if key in mapping), MISSING) for key in (name, spelled))
        if plain is not MISSING and behind is not MISSING and plain != behind:
            problems.append(f"setting {name} is also set as {spelled}, to another value; keep {spelled}, Celery versions differ in which one they take")
    return problems


def _plain(key: str, namespace: str) -> str:
    lowered = key.lower()
    for prefix in (namespace.lower(), "celery_"):
        if prefix and lowered.startswith(prefix + PREFIX):
            return lowered[len(prefix) :]
    return lowered
