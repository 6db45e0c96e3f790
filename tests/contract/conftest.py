"""The stores that the contract suite runs over, each with a clock that can be moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from celery_guard.stores.memory import MemoryStore
from celery_guard.stores.protocols import GuardStore
from celery_guard.stores.redis import RedisStore
from tests.contract.clocks import AgedData, FakeClock
from tests.contract.verbs import Verbs


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client, to look behind the store."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def redis_store(redis_url: str, key_prefix: str) -> Iterator[RedisStore]:
    """A store on a real server, under its own prefix."""
    store = RedisStore.from_url(redis_url, prefix=key_prefix)
    yield store
    store.close()


@pytest.fixture
def redis_verbs(redis_store: RedisStore) -> Verbs:
    return Verbs(redis_store)


@pytest.fixture
def aged(redis_client: redis.Redis, key_prefix: str) -> AgedData:
    """Time, and the keys, of ``redis_store``."""
    return AgedData(redis_client, key_prefix)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> GuardStore:
    """Each store in turn."""
    if request.param == "memory":
        return MemoryStore(clock=request.getfixturevalue("clock"))
    redis_store: RedisStore = request.getfixturevalue("redis_store")
    return redis_store


@pytest.fixture
def verbs(store: GuardStore) -> Verbs:
    return Verbs(store)


@pytest.fixture
def advance(store: GuardStore, request: pytest.FixtureRequest) -> Callable[[float], None]:
    """Let seconds pass for ``store``."""
    passing: FakeClock | AgedData = request.getfixturevalue("clock" if isinstance(store, MemoryStore) else "aged")
    return passing.advance
