"""A small webshop that uses celery_guard, the demo that runs it, and the local services that demo and tests start.

``celery -A example_app worker`` finds ``app`` here. It is imported when it is asked for, so that the
launchers beside it stay free of Celery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from example_app.celery_app import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from example_app.celery_app import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
