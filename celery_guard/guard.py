"""Guard: the composition root. One per app: settings, store, heartbeat, and the names of decisions.

Everything is built at first use, so that importing a task module does no I/O, and dropped after a
fork, so that no process uses another's connection or thread.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from celery import Celery
from celery.local import Proxy

from celery_guard import signals
from celery_guard.backlog import Backlog
from celery_guard.config import Settings
from celery_guard.decisions import EndRequest, ExtendRequest, ExtendResult
from celery_guard.errors import ConfigurationError, StoreUnavailable
from celery_guard.heartbeat import Heartbeat
from celery_guard.stores.protocols import GuardStore

__all__ = ["FLUSH_TIMEOUT", "Guard", "flush_backlogs"]

logger = logging.getLogger("celery_guard")

_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
#: Parameters of ``send_task`` that may be given by position, behind self, name, args and kwargs.
_POSITIONAL = tuple(inspect.signature(Celery.send_task).parameters)[4:]
#: Celery's own default (kombu/transport/redis.py, 5.3 to 5.7).
DEFAULT_VISIBILITY_TIMEOUT = 3600.0
#: Seconds that a process going down waits for what it still has to give back.
FLUSH_TIMEOUT = 3.0


class Guard:
    """The plugin on one app.

    The first bound ``GuardedTask`` makes it; call ``Guard(app)`` to make it explicitly. A second
    call for the same app returns an object that shares everything with the first.

    Args:
        app: The Celery app to install on.
    """

    _installing: ClassVar[threading.Lock] = threading.Lock()

    def __new__(cls, app: Celery) -> Guard:
        resolve = getattr(app, "_get_current_object", None)  # celery.current_app is a proxy
        app = app if resolve is None else resolve()
        if isinstance(app, Proxy):  # ``celery.current_app``
            app = app._get_current_object()
        existing = app.__dict__.get("_celery_guard")
        if isinstance(existing, Guard):
            return existing
        with cls._installing:  # installed twice, a dispatch would be the duplicate of itself
            existing = app.__dict__.get("_celery_guard")
            if isinstance(existing, Guard):
                return existing
            self = super().__new__(cls)
            self._setup(app)
            return self

    def _setup(self, app: Celery) -> None:
        self._app = weakref.ref(app)
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._store: GuardStore | None = None
        self._eager_store: GuardStore | None = None
        self._heartbeat: Heartbeat | None = None
        self._backlog: Backlog | None = None
        self._visibility_timeout: float | None = None  # None: not looked up yet
        #: Jitter only; tokens come from ``secrets``.
        self.random = random.Random()
        #: What another plugin put on this app before us, or None.
        self._send_before: Callable[..., Any] | None = app.__dict__.get("send_task")
        app.__dict__["send_task"] = _guarded_send_task(self)
        app.__dict__["_celery_guard"] = self
        _guards.add(self)

    @property
    def app(self) -> Celery:
        app = self._app()
        if app is None:
            raise ConfigurationError("the Celery app of this Guard is gone; keep a reference to the app")
        return app

    def send_task(self, name: str, args: Any, kwargs: Any, **options: Any) -> Any:
        """The app's own ``send_task``, which ours is put in front of."""
        if self._send_before is not None:
            return self._send_before(name, args, kwargs, **options)
        app = self.app
        # Looked up at each call: a plugin may patch the class after us.
        return type(app).send_task(app, name, args, kwargs, **options)

    @property
    def settings(self) -> Settings:
        """The app's guard settings, read once.

        Raises:
            ConfigurationError: With every problem.
        """
        if self._settings is None:
            with self._lock:
                if self._settings is None:
                    self._settings = Settings.from_conf(self.app.conf)
        return self._settings

    @property
    def store(self) -> GuardStore:
        """The lock store of this process."""
        if self._store is None:
            with self._lock:
                if self._store is None:
                    self._store = _make_store(self.settings, self.app)
        return self._store

    @property
    def eager_store(self) -> GuardStore:
        """The in-memory store of tasks that are applied eagerly (``guard_eager``)."""
        if self._eager_store is None:
            with self._lock:
                if self._eager_store is None:
                    from celery_guard.stores.memory import MemoryStore

                    self._eager_store = MemoryStore(prefix=self.settings.key_prefix)
        return self._eager_store

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this process."""
        if self._heartbeat is None:
            with self._lock:
                if self._heartbeat is None:
                    self._heartbeat = Heartbeat(self._extend)
        return self._heartbeat

    def _extend(self, requests: Sequence[ExtendRequest]) -> list[ExtendResult]:
        return self.store.extend(requests)

    @property
    def backlog(self) -> Backlog:
        """What this process has to give back to the store, outside of the path that found out."""
        if self._backlog is None:
            with self._lock:
                if self._backlog is None:
                    self._backlog = Backlog()
        return self._backlog

    def release_now(self, resource: str, owner: str, ttl: float | None = None) -> None:
        """Release (or shorten) a claim on an error path; if the store is away, keep trying behind."""
        try:
            self.store.release_claim(resource, owner, ttl)
        except StoreUnavailable as exc:
            logger.warning("celery_guard: claim of %r could not be released, trying again: %s", resource, exc)
            self.release_later(resource, owner, ttl)

    def end_now(self, request: EndRequest) -> None:
        """Settle what no run will; if the store is away, keep trying behind."""
        try:
            self.store.end(request)
        except StoreUnavailable as exc:
            logger.warning("celery_guard: claim of %r could not be released, trying again: %s", request.claim, exc)
            self.end_later(request)

    def end_later(self, request: EndRequest) -> None:
        """Settle what no run will, from the backlog's thread."""
        self.backlog.put(lambda: self.store.end(request))

    def release_later(self, resource: str, owner: str, ttl: float | None = None) -> None:
        """Release a claim from the backlog's thread."""
        self.backlog.put(lambda: self.store.release_claim(resource, owner, ttl))

    @property
    def visibility_timeout(self) -> float | None:
        """Seconds after which the broker delivers an unacknowledged message again, or None."""
        if self._visibility_timeout is None:
            url = _first(self.app.conf.broker_read_url)
            options = self.app.conf.broker_transport_options or {}
            known = url.startswith(("redis", "rediss", "unix", "sentinel"))
            self._visibility_timeout = float(options.get("visibility_timeout", DEFAULT_VISIBILITY_TIMEOUT)) if known else float("inf")
        return None if self._visibility_timeout == float("inf") else self._visibility_timeout

    def announce(self, decision: str, sender: Any, *, level: int = logging.INFO, **fields: Any) -> None:
        """Tell a decision under its one name: as log record and as signal.

        Args:
            decision: One of ``signals.SIGNALS``.
            sender: The task.
            level: Level of the log record.
            **fields: ``task_id``, ``key``, ``lock`` and whatever else the decision has to say.
        """
        if logger.isEnabledFor(level):
            extra = {"decision": decision, "task": getattr(sender, "name", None), **{f"guard_{name}": value for name, value in fields.items()}}
            shown = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
            logger.log(level, "%s %s %s", getattr(sender, "name", sender), decision, shown, extra=extra)
        signal = signals.SIGNALS[decision]
        if signal.receivers:
            # A receiver may name what its signal promises as plain parameters.
            promised = dict.fromkeys(signal.providing_args)  # type: ignore[attr-defined]
            signal.send(sender=sender, **{**promised, **fields, "decision": decision})

    def forget(self) -> None:
        """Drop store and heartbeat without closing anything: they belong to another process."""
        self._lock = threading.RLock()
        self._store = None
        self._eager_store = None  # its mutex may have been held by a thread that is not in this process
        self._heartbeat = None
        self._backlog = None
        self.random = random.Random()

    def close(self) -> None:
        """Close the store's connections; the next use makes new ones."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()


def _guarded_send_task(guard: Guard) -> Any:
    """Wrap ``app.send_task``: the one way that every dispatch takes, by task or by name."""

    @functools.wraps(Celery.send_task)
    def send_task(name: str, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        options |= zip(_POSITIONAL, positional, strict=False)
        task = options.get("task_type")
        if task is None:
            # The registry itself, like Celery does: asking ``app.tasks`` would finalize the app.
            task = guard.app._tasks.get(name)  # type: ignore[attr-defined]
        dispatch = getattr(task, "_guarded_dispatch", None)
        if dispatch is None:
            options.pop("guard", None)
            return guard.send_task(name, args, kwargs, **options)
        return dispatch(guard, name, args, kwargs, options)

    return send_task


def _make_store(settings: Settings, app: Celery) -> GuardStore:
    backend = settings.store_backend
    if backend == "memory":
        from celery_guard.stores.memory import MemoryStore

        return MemoryStore(prefix=settings.key_prefix)
    from celery_guard.stores.redis import RedisStore

    options: dict[str, Any] = dict(settings.store_transport_options)
    if backend == "broker":
        backend = _first(app.conf.broker_write_url)
        options = {**_tls(app.conf.broker_use_ssl), **options}
    elif backend == "result":
        backend = _first(app.conf.result_backend)
        options = {**_tls(app.conf.get("redis_backend_use_ssl")), **options}
    return RedisStore.from_url(
        backend,
        prefix=settings.key_prefix,
        connect_timeout=settings.store_connect_timeout,
        command_timeout=settings.store_timeout,
        retries=settings.store_retries,
        max_connections=settings.store_max_connections,
        client_options=options,
    )


def _first(url: Any) -> str:
    """The first of several broker URLs."""
    if isinstance(url, list | tuple):
        url = url[0] if url else ""
    return str(url or "").split(";")[0]


def _tls(options: Any) -> dict[str, Any]:
    return dict(cast("Mapping[str, Any]", options)) if isinstance(options, Mapping) else {}


@atexit.register
def flush_backlogs() -> None:
    """Give back what this process still can: nobody else knows of a claim whose message was never sent, and it would live for its whole ttl."""
    for guard in list(_guards):
        if guard._backlog is not None:
            guard._backlog.flush(FLUSH_TIMEOUT)


def _after_fork() -> None:
    Guard._installing = threading.Lock()
    for guard in list(_guards):
        guard.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
