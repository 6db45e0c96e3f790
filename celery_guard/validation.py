"""How options are validated: problems are collected as texts, never raised one by one.

``Option`` is the base of the dataclasses in ``options.py``, ``collecting`` makes their constructors
take what they do not know as a problem. This module imports no Celery, Redis or clock.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, TypeVar

__all__ = ["MAX_DURATION", "Duration", "Option", "Problems", "collecting", "listed", "seconds", "shown"]

Duration = float | int | timedelta
#: Longest duration in seconds (ten years): beyond it dates overflow, and milliseconds were meant.
MAX_DURATION = 10 * 365 * 86400.0

_T = TypeVar("_T")


def seconds(value: Any) -> float:
    """Turn a duration into seconds.

    Raises:
        ValueError: If it is not a finite number or a timedelta, or longer than ``MAX_DURATION``.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number of seconds or a timedelta")  # noqa: TRY004
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number) or abs(number) > MAX_DURATION:
        raise ValueError("must be a number of seconds of at most ten years")
    return number


def shown(value: Any, limit: int = 200) -> str:
    """Show a value of any kind in a message: never raises, at most ``limit`` characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # a broken __repr__ must not hide the problem that is being reported
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def listed(names: Iterable[str]) -> str:
    """Show several names in a message."""
    return ", ".join(repr(name) for name in names)


class Problems(list[str]):
    """Collects what is wrong with one option instead of stopping at the first."""

    def __init__(self, option: str) -> None:
        super().__init__()
        self.option = option

    def note(self, name: str, value: Any, text: str) -> None:
        """Note what is wrong with the value of one field."""
        self.append(f"{self.option}.{name}={shown(value)}: {text}")

    def duration(self, name: str, value: Any, *, above: float | None = None, at_least: float | None = None) -> float | None:
        """Return the seconds, or None when something is wrong with the value."""
        try:
            number = seconds(value)
        except ValueError as exc:
            self.note(name, value, f"{exc}; write for example {name}=30 or {name}=timedelta(seconds=30)")
            return None
        if above is not None and not number > above:
            self.note(name, value, f"must be greater than {above:g} seconds")
            return None
        if at_least is not None and number < at_least:
            self.note(name, value, f"must be at least {at_least:g} seconds")
            return None
        return number

    def one_of(self, name: str, value: Any, allowed: tuple[str, ...], later: tuple[str, ...] = ()) -> None:
        """Note a value that is none of ``allowed``; those of ``later`` are told to be of a later version."""
        if isinstance(value, str) and value in allowed:
            return
        if isinstance(value, str) and value in later:
            self.note(name, value, f"is not part of this version; use one of {listed(allowed)}")
            return
        near = difflib.get_close_matches(value, allowed, 1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        self.note(name, value, f"must be one of {listed(allowed)}{hint}")

    def key(self, value: Any) -> None:
        """Note a value that is no ``KeySpec``."""
        if value is None or (callable(value) and not isinstance(value, type)):
            return
        if isinstance(value, str):
            if not value.strip():
                self.note("key", value, "is empty; write a template such as 'product:{product_id}', [] for one key per task, or None for all arguments")
            return
        if isinstance(value, Sequence) and all(isinstance(item, str) and item for item in value):
            return
        self.note("key", value, "must be a template string, a list of argument names, a function or None")

    def boolean(self, name: str, value: Any) -> None:
        """Note a value that is neither True nor False."""
        if not isinstance(value, bool):
            self.note(name, value, "must be True or False")


@dataclass(frozen=True, slots=True, repr=False)
class Option:
    """What all options share.

    Attributes:
        problems: What is wrong with the values, one text each; empty when all is well.
    """

    problems: tuple[str, ...] = field(default=(), init=False, compare=False)

    def __repr__(self) -> str:
        given = (f"{item.name}={shown(value)}" for item in fields(self) if item.init and (value := getattr(self, item.name)) != item.default)
        return f"{type(self).__name__}({', '.join(given)})"

    def settle(self, problems: Sequence[str], **values: Any) -> None:
        """Keep the problems and the normal form of the values; None leaves a value as it was written."""
        object.__setattr__(self, "problems", tuple(problems))
        for name, value in values.items():
            if value is not None:
                object.__setattr__(self, name, value)


def collecting(later: tuple[str, ...] = ()) -> Callable[[type[_T]], type[_T]]:
    """Make the constructor of an option dataclass note arguments it does not know instead of raising.

    Type checkers and editors still see the signature that the dataclass made.

    Args:
        later: Fields that only a later version knows.
    """

    def decorate(cls: Any) -> Any:
        generated = cls.__init__
        names = [item.name for item in fields(cls) if item.init]

        @functools.wraps(generated)
        def construct(self: Any, *args: Any, **given: Any) -> None:
            problems = Problems(cls.__name__)
            for extra in args[len(names) :]:
                problems.append(f"{cls.__name__}: one value too many, {shown(extra)}; it takes {', '.join(names)}")
            for name in names[: len(args)]:
                if name in given:
                    problems.note(name, given.pop(name), "is given twice, by position and by name; remove one")
            for name in [name for name in given if name not in names]:
                value = given.pop(name)
                if name in later:
                    problems.note(name, value, "is not part of this version; remove it")
                    continue
                near = difflib.get_close_matches(name, names, 1)
                problems.note(name, value, f"unknown field; did you mean {near[0]!r}?" if near else f"unknown field; known are {', '.join(names)}")
            generated(self, *args[: len(names)], **given)
            object.__setattr__(self, "problems", (*problems, *self.problems))

        cls.__init__ = construct
        return cls

    return decorate
