"""Guards for Celery tasks: unique dispatch and execution locks that survive crashes.

``GuardedTask`` under a task and ``guard_store_backend`` in the settings is all it takes.
"""

from celery_guard.errors import (
    ConfigurationError,
    DuplicateTask,
    GuardError,
    KeyDerivationError,
    LockLost,
    OverlapRefused,
    PoisonTask,
    PostponedTooLong,
    StoreUnavailable,
)
from celery_guard.guard import Guard
from celery_guard.options import Backoff, Unique, WithoutOverlapping
from celery_guard.result import GuardedResult
from celery_guard.task import GuardedTask

__all__ = [
    "Backoff",
    "ConfigurationError",
    "DuplicateTask",
    "Guard",
    "GuardError",
    "GuardedResult",
    "GuardedTask",
    "KeyDerivationError",
    "LockLost",
    "OverlapRefused",
    "PoisonTask",
    "PostponedTooLong",
    "StoreUnavailable",
    "Unique",
    "WithoutOverlapping",
]

__version__ = "0.1.0"
