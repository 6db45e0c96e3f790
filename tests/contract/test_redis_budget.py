"""What the Redis store may cost: round trips, memory, and no key left for ever."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_guard.decisions import BeginRequest, ClaimRequest, ExtendOutcome, ExtendRequest
from celery_guard.stores.redis import RedisStore
from celery_guard.stores.redis.scripts import SCRIPTS
from example_app.processes import wait_until
from example_app.services import RedisServer
from tests.contract.verbs import Verbs

#: Bytes of one waiting claim with its entry in the index.
CLAIM_BUDGET = 400


@pytest.fixture
def server(private_redis: Callable[..., RedisServer]) -> RedisServer:
    return private_redis()


@pytest.fixture
def client(server: RedisServer) -> Any:
    with redis.Redis(port=server.port) as client:
        yield client


@pytest.fixture
def store(server: RedisServer) -> Any:
    store = RedisStore.from_url(server.url())
    yield store
    store.close()


@pytest.fixture
def calls(client: Any) -> Callable[[Callable[[], Any]], dict[str, int]]:
    """Commands that the store sends while something is done, by name; scripts count once, however much they do."""

    def counted(act: Callable[[], Any]) -> dict[str, int]:
        # What scripts call is counted as well, so that only what scripts cannot call tells.
        names = ("evalsha", "eval", "ping", "script|load", "client|setname", "client|setinfo", "hello", "auth", "select")
        client.config_resetstat()
        act()
        stats = client.info("commandstats")
        return {name: stats[f"cmdstat_{name}"]["calls"] for name in names if f"cmdstat_{name}" in stats}

    return counted


def test_one_round_trip_each(store: RedisStore, calls: Callable[[Callable[[], Any]], dict[str, int]]) -> None:
    """Dispatch, duplicate, begin, refusal, heartbeat and end are one round trip each."""
    verbs = Verbs(store)
    for name in SCRIPTS:  # known to the server, and a connection is there
        store._link.command("SCRIPT", "LOAD", SCRIPTS[name].source)
    acts: list[Callable[[], Any]] = [
        verbs.claim,
        lambda: verbs.claim("o2"),
        lambda: verbs.begin(claim="r", lock="L", max_crashes=3),
        lambda: verbs.begin("o2", "t2", lock="L"),
        lambda: verbs.extend(claim="r", lock="L"),
        lambda: verbs.end(claim="r", lock="L"),
        lambda: store.release_claim("r", "o1"),
        lambda: store.get_claim("r"),
        lambda: store.get_lock("L"),
        lambda: store.force_release_slot("L", "t1"),
    ]
    for act in acts:
        assert calls(act) == {"evalsha": 1}


def test_first_use_of_a_script(store: RedisStore, calls: Callable[[Callable[[], Any]], dict[str, int]]) -> None:
    """A script that the server does not know takes one round trip more, once, and no SCRIPT LOAD."""
    store.ping()
    assert calls(Verbs(store).claim) == {"evalsha": 1, "eval": 1}
    assert calls(Verbs(store).claim) == {"evalsha": 1}


def test_heartbeat_of_a_thousand_locks(store: RedisStore, calls: Callable[[Callable[[], Any]], dict[str, int]]) -> None:
    """A process that holds 1,000 locks and claims extends them in one round trip."""
    requests = []
    for n in range(1000):
        names = {"owner": f"o{n}", "token": f"t{n}", "generation": 0, "task_id": f"task-{n}", "worker": "w", "lease": 30.0}
        fence = store.begin(BeginRequest(**names, claim=f"r{n}", lock=f"L{n}")).fence
        requests.append(ExtendRequest(**names, claim=f"r{n}", lock=f"L{n}", fence=fence))
    store.extend(requests[:1])
    results: list[Any] = []
    assert calls(lambda: results.extend(store.extend(requests))) == {"evalsha": 1}
    assert {(result.outcome, result.claim_lost) for result in results} == {(ExtendOutcome.HELD, False)}
    assert len(results) == 1000


def test_very_long_heartbeats_are_cut(store: RedisStore, calls: Callable[[Callable[[], Any]], dict[str, int]]) -> None:
    """Beyond 2,000 runs the server is not held up by one script."""
    store.extend([ExtendRequest("o", "t", 0, "task", "w", 30.0)])
    requests = [ExtendRequest(f"o{n}", f"t{n}", 0, "task", "w", 30.0) for n in range(4500)]
    assert calls(lambda: store.extend(requests)) == {"evalsha": 3}


def test_memory_of_a_claim(store: RedisStore, client: Any) -> None:
    """A waiting claim and its index entry stay within their bytes, so that a million wait in 400 MB."""
    store.claim(ClaimRequest("first", "o", "t", 60))
    before = client.info("memory")["used_memory"]
    count = 20_000
    for n in range(count):
        store.claim(ClaimRequest(f"shop.rebuild:product:{n:08}", secrets.token_urlsafe(16), str(uuid.uuid4()), 3600))
    used = (client.info("memory")["used_memory"] - before) / count
    assert 100 < used < CLAIM_BUDGET


def test_nothing_stays_for_ever(redis_verbs: Verbs, redis_client: redis.Redis, aged: Any) -> None:
    """Every key expires by itself, but for the two indexes, which are swept; and these are empty when nothing is held."""
    redis_verbs.claim()
    redis_verbs.begin(claim="r", lock="L", max_crashes=3)
    redis_verbs.begin(token="t2", claim="r", lock="L")
    lives = {key.rpartition(b":")[2]: redis_client.pttl(key) for key in aged.list_keys()}
    assert set(lives) == {b"claim", b"slots", b"holders", b"fence", b"run", b"claims", b"locks"}
    assert {kind for kind, life in lives.items() if life == -1} == {b"claims", b"locks"}
    redis_verbs.end(claim="r", lock="L")
    assert {key.rpartition(b":")[2] for key in aged.list_keys()} == {b"fence", b"run"}
    assert all(redis_client.pttl(key) > 0 for key in aged.list_keys())


def test_claim_expires_on_the_server(redis_verbs: Verbs) -> None:
    """The real clock of a real server ends a claim, a slot and a record, without anybody's doing."""
    redis_verbs.claim(ttl=0.05)
    redis_verbs.begin(lock="L", lease=0.05)
    wait_until(lambda: redis_verbs.claim("o2").outcome == "claimed", 10)
    wait_until(lambda: redis_verbs.begin("o2", "t2", lock="L", lease=60).outcome == "run", 10)
