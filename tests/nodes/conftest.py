"""pytest-celery's nodes over local processes, or over Docker with CELERY_GUARD_DOCKER=1 and a daemon that answers.

The plugins of pytest-celery and pytest-docker-tools are blocked for the rest of the tests (see ``addopts``);
here their fixtures come in by name, so that they exist in this folder only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from pytest_celery import *  # noqa: F403 - a plugin's fixtures are meant to be imported whole
from pytest_celery import CeleryTestSetup, CeleryWorkerContainer

from celery_guard import Guard
from example_app.services import ROOT
from tests.conftest import missing
from tests.nodes import node_tasks
from tests.nodes.process_docker import ProcessClient

if TYPE_CHECKING:
    from celery import Celery

DOCKER = os.environ.get("CELERY_GUARD_DOCKER") == "1"


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Set the option that the blocked plugin would have defined."""
    if not hasattr(config.option, "reuse_containers"):
        config.option.reuse_containers = False


@pytest.fixture(scope="session")
def docker_client() -> Iterator[Any]:
    if DOCKER:
        import docker

        try:
            client = docker.from_env()
            client.ping()
        except docker.errors.DockerException as error:
            missing("docker", error)
        yield client
        client.close()
        return
    # In a container pytest-docker-tools would look for the standard ports on other addresses.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_docker_tools.wrappers.container.tests_inside_container", lambda: False)
        yield ProcessClient()


class NodeSetup(CeleryTestSetup):
    @classmethod
    def update_app_config(cls, app: Celery) -> None:
        app.conf.update(
            broker_connection_retry_on_startup=True,
            broker_transport_options={"visibility_timeout": 3, "unacked_restore_interval": 1, "unacked_restore_throttle": 1},
            worker_prefetch_multiplier=1,
            guard_store_backend="result",
        )

    def teardown(self) -> None:
        """Close the connections of the app, which would warn from somebody else's test."""
        Guard(self.app).close()
        self.app.amqp.producer_pool.force_close_all()
        self.app.pool.force_close_all()
        with suppress(AttributeError):
            self.app.backend.client.connection_pool.disconnect()
        self.app.close()
        super().teardown()


class PreforkWorker(CeleryWorkerContainer):
    @classmethod
    def command(cls, *args: str, **options: Any) -> list[str]:
        return super().command("-P", "prefork", "-c", "2", "--without-mingle", "--without-gossip", *args, **options)

    @classmethod
    def tasks_modules(cls) -> set[ModuleType]:
        return {*super().tasks_modules(), node_tasks}

    @classmethod
    def initial_env(cls, *args: Any, **options: Any) -> dict[str, str]:
        return {**super().initial_env(*args, **options), "CELERY_GUARD_NODE": "1"}

    @classmethod
    def initial_content(cls, *args: Any, **options: Any) -> dict[str, bytes]:
        """Under Docker the package goes into the worker's volume; local processes have it already."""
        content: dict[str, bytes] = super().initial_content(*args, **options)
        if DOCKER:
            files = [path for path in (ROOT / "celery_guard").rglob("*") if path.suffix in {".py", ".lua"}]
            content |= {str(path.relative_to(ROOT)): path.read_bytes() for path in files}
        return content


@pytest.fixture
def celery_setup_cls() -> type[CeleryTestSetup]:
    return NodeSetup


@pytest.fixture
def default_worker_container_cls() -> type[CeleryWorkerContainer]:
    return PreforkWorker


# pytest-celery parametrizes these two over sets, whose order differs between processes: xdist would refuse to run.


@pytest.fixture
def celery_broker(celery_redis_broker: Any) -> Any:
    return celery_redis_broker


@pytest.fixture
def celery_backend(celery_redis_backend: Any) -> Any:
    return celery_redis_backend
