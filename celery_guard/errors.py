"""Exceptions of celery_guard.

Every error says what happened, to which task and key, and what to do about it. All of them can be
pickled: Celery sends exceptions between processes, and one that cannot be rebuilt kills a worker.
This module imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ConfigurationError",
    "DuplicateTask",
    "GuardError",
    "KeyDerivationError",
    "LockLost",
    "OverlapRefused",
    "PoisonTask",
    "PostponedTooLong",
    "StoreUnavailable",
]


class GuardError(Exception):
    """Base of all errors raised by celery_guard.

    Subclasses list the names of their data in ``_fields``; the constructor takes them as keywords,
    they become attributes, and they survive pickling.

    Args:
        message: Text for people.
        **data: Values for the names in ``_fields``; absent ones are None.
    """

    _fields: tuple[str, ...] = ()

    def __init__(self, message: str = "", **data: Any) -> None:
        super().__init__(message)
        unknown = set(data) - set(self._fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        for name in self._fields:
            setattr(self, name, data.get(name))

    @property
    def message(self) -> str:
        """The text that the error was raised with."""
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        data = {name: getattr(self, name, None) for name in self._fields}
        return (_rebuild, (type(self), self.message, data))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((type(self), self.message))


def _rebuild(cls: type[GuardError], message: str, data: dict[str, Any]) -> GuardError:
    return cls(message, **data)


class ConfigurationError(GuardError):
    """A setting or a task option is wrong.

    Attributes:
        problems: Every problem found, one text each, in the order in which they were found.
    """

    _fields = ("problems",)
    problems: Sequence[str]

    def __init__(self, message: str = "", problems: Sequence[str] | None = None) -> None:
        super().__init__(message, problems=tuple(problems or ((message,) if message else ())))

    @classmethod
    def of(cls, problems: Sequence[str]) -> ConfigurationError:
        """Build one error out of several problems."""
        if len(problems) == 1:
            return cls(problems[0], problems)
        lines = "".join(f"\n  - {problem}" for problem in problems)
        return cls(f"{len(problems)} problems:{lines}", problems)


class KeyDerivationError(GuardError):
    """The key of a task call cannot be made from its arguments.

    Attributes:
        task: Name of the task.
        argument: Path of the argument at fault (``"order.items[3]"``), or None.
    """

    _fields = ("task", "argument")
    task: str
    argument: str | None


class DuplicateTask(GuardError):
    """``on_conflict="raise"``: the key of this dispatch is claimed by another message.

    Attributes:
        task: Name of the task.
        key: The claimed resource key.
        task_id: Id of the task that holds the claim.
        state: ``"queued"`` or ``"running"``.
        age: Seconds since the claim was taken.
    """

    _fields = ("task", "key", "task_id", "state", "age")
    task: str
    key: str
    task_id: str
    state: str
    age: float


class OverlapRefused(GuardError):
    """``on_conflict="raise"``: every slot of the execution lock is taken.

    Attributes:
        task: Name of the task.
        key: The resource key of the lock.
        task_id: Id of a task that holds a slot, or None.
        limit: Number of slots.
    """

    _fields = ("task", "key", "task_id", "limit")
    task: str
    key: str
    task_id: str | None
    limit: int


class PostponedTooLong(GuardError):
    """A task was postponed for longer than its ``give_up_after``.

    Attributes:
        task: Name of the task.
        key: The resource key of the lock that stayed busy.
        postponed: How many times the task was postponed.
        waited: Seconds since the first postponement.
    """

    _fields = ("task", "key", "postponed", "waited")
    task: str
    key: str
    postponed: int
    waited: float


class PoisonTask(GuardError):
    """A message took down its worker ``guard_max_crashes`` times and is not run again.

    Attributes:
        task: Name of the task.
        task_id: Id of the task.
        crashes: How many runs began and never ended.
    """

    _fields = ("task", "task_id", "crashes")
    task: str
    task_id: str
    crashes: int


class LockLost(GuardError):
    """The lock of the running task is no longer its own.

    Attributes:
        task: Name of the task.
        key: The resource key of the lock.
        token: The execution token that was lost.
    """

    _fields = ("task", "key", "token")
    task: str
    key: str
    token: str


class StoreUnavailable(GuardError):
    """The lock store did not answer, or refused the command.

    Attributes:
        operation: What was attempted, for example ``"claim"``.
        address: The server, never with a password.
        uncertain: True when the command may have been carried out (the answer was lost).
    """

    _fields = ("operation", "address", "uncertain")
    operation: str
    address: str
    uncertain: bool
