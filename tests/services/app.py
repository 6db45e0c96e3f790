"""Celery apps whose addresses come from the environment, so that a worker and its test build the same one.

A module with tasks says ``app = create_app(__name__)`` and defines them on it. A worker imports it under
the variables of an ``AppEnvironment``; the test imports it with ``load_app`` under the same ones.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from celery import Celery, _state

URL = "CELERY_GUARD_TEST_URL"
PREFIX = "CELERY_GUARD_TEST_PREFIX"
CONF = "CELERY_GUARD_TEST_CONF"


@dataclass(frozen=True)
class AppEnvironment:
    """Where an app finds its services.

    Attributes:
        url: Redis database for broker, results and guard store.
        prefix: In front of every broker and result key: set on a server that is not ours alone.
        conf: Further settings; values must be JSON.
    """

    url: str
    prefix: str = ""
    conf: Mapping[str, Any] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """The same as environment variables."""
        return {URL: self.url, PREFIX: self.prefix, CONF: json.dumps(dict(self.conf))}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the variables in this process for a while."""
        before = {name: os.environ.get(name) for name in (URL, PREFIX, CONF)}
        os.environ.update(self.variables())
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _look_for_lost_messages_often() -> None:
    """Look for messages of dead workers every 10 seconds with a kombu that has no setting for it and looks every 100."""
    from kombu.transport import redis as transport

    if not hasattr(transport.Channel, "unacked_restore_throttle"):
        transport.QoS.restore_visible.__defaults__ = (0, 10, 1)  # start, num, interval


def create_app(name: str, **conf: Any) -> Celery:
    """Make an app on the services of the environment.

    Args:
        name: The app's main name; its tasks are called ``<name>.<function>``.
        **conf: Settings for every user of the module; those of the environment win.
    """
    _look_for_lost_messages_often()
    url = os.environ[URL]
    app = Celery(name, broker=url, backend=url, set_as_current=False)
    transport: dict[str, Any] = {
        # kombu looks for messages of dead workers only every 100 seconds by default.
        "visibility_timeout": 5,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    results: dict[str, Any] = {}
    if prefix := os.environ.get(PREFIX):
        transport["global_keyprefix"] = prefix
        results["global_keyprefix"] = prefix
    app.conf.update(
        guard_store_backend=url,
        broker_transport_options=transport,
        result_backend_transport_options=results,
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        result_expires=600,
        task_track_started=True,
        worker_hijack_root_logger=True,
    )
    app.conf.update(conf)
    app.conf.update(json.loads(os.environ.get(CONF) or "{}"))
    return app


@contextmanager
def no_shared_tasks() -> Iterator[None]:
    """Forget the tasks that are shared with later apps meanwhile.

    ``@app.task`` registers its function with every app that is finalized after it, also with the next
    import of the same module, where Celery 5.7 warns of the duplicate and keeps the old function.
    """
    shared: set[Any] = getattr(_state, "_on_app_finalizers")  # noqa: B009 - absent from the type stubs
    before = set(shared)
    yield
    shared.intersection_update(before)


def load_app(module: str, environment: AppEnvironment) -> Celery:
    """Import ``module`` anew under ``environment`` and return its ``app``, for use in this process."""
    with environment.applied(), no_shared_tasks():
        sys.modules.pop(module, None)
        app = importlib.import_module(module).app
    assert isinstance(app, Celery)
    return app
