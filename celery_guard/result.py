"""GuardedResult: what a guarded dispatch returns."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from celery.result import AsyncResult

from celery_guard.decisions import ClaimState

__all__ = ["Conflict", "GuardedResult"]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Who was in the way of a duplicate dispatch.

    Attributes:
        key: The claimed resource.
        task_id: Id of the task that holds the claim.
        state: Where that task is: queued, running or done.
        age: Seconds since the claim was taken.
    """

    key: str
    task_id: str
    state: ClaimState
    age: float


class GuardedResult(AsyncResult):  # type: ignore[type-arg]
    """The result of a dispatch: the new task's, or for a duplicate that of the task in its place.

    Attributes:
        duplicate: True if nothing was sent since another message holds the claim; ``id`` and
            ``get()`` are then those of that task.
        conflict: For a duplicate, who was in the way; else None.
    """

    duplicate: bool = False
    conflict: Conflict | None = None

    def __repr__(self) -> str:
        mark = " duplicate" if self.duplicate else ""
        return f"<GuardedResult: {self.id}{mark}>"

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's own.

        Raises:
            NotImplementedError: For a duplicate with the ``rpc`` backend, whose results reach only the sender of the task.
        """
        rpc = sys.modules.get("celery.backends.rpc")
        if self.duplicate and rpc is not None and isinstance(self.backend, rpc.RPCBackend):
            raise NotImplementedError(
                f"the result of task {self.id} goes to the process that sent it (result backend rpc), waiting here would never end; "
                "use another result backend, or do not wait for duplicates (result.duplicate is True)"
            )
        return super().get(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild: tuple[Any, ...] = super().__reduce__()  # type: ignore[assignment]
        return (*rebuild, {"duplicate": True, "conflict": self.conflict}) if self.duplicate else rebuild

    def as_duplicate(self, conflict: Conflict, ignored: Any) -> GuardedResult:
        """Mark this result as the one of a duplicate dispatch."""
        self.duplicate = True
        self.conflict = conflict
        self.ignored = ignored
        return self
