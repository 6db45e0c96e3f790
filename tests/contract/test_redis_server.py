"""The Redis store and its server: log-in, rights, lost connections, slow, absent and wrong servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest
import redis

from celery_guard.decisions import BeginOutcome, ClaimOutcome, ExtendOutcome
from celery_guard.errors import StoreUnavailable
from celery_guard.stores.redis import RedisStore
from example_app.services import RedisServer
from tests.contract.fake_server import FakeServer
from tests.contract.verbs import Verbs

Private = Callable[..., RedisServer]
#: Far more than any of these waits may take, far less than a hang.
SOON = 20.0
PASSWORD = "p#@/:%x ü"
#: What a user of the store needs, and nothing else.
COMMANDS = ("evalsha", "eval", "time", "get", "set", "del", "pttl", "pexpire", "pexpireat", "zadd", "zrem", "zscore", "zcard", "zcount", "zrank")
MORE_COMMANDS = ("zrange", "zrangebyscore", "zremrangebyscore", "hset", "hget", "hdel")


@pytest.fixture
def stores() -> Any:
    """Make stores that are closed with the test."""
    made: list[RedisStore] = []

    def make(url: str, **options: Any) -> RedisStore:
        made.append(RedisStore.from_url(url, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


def refused(act: Callable[[], Any]) -> StoreUnavailable:
    """The error of an act that must fail, and soon."""
    start = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        act()
    assert time.monotonic() - start < SOON
    return caught.value


# --------------------------------------------------------------------------- ways to connect


def test_unix_socket(private_redis: Private, stores: Any) -> None:
    """The store works over a unix socket, in the database that was named."""
    server = private_redis()
    store = stores(f"unix://{server.unix_socket}?db=3")
    assert Verbs(store).claim().outcome is ClaimOutcome.CLAIMED
    assert stores(server.url(3)).get_claim("r") is not None
    assert stores(server.url(2)).get_claim("r") is None


def test_user_with_the_least_rights(private_redis: Private, stores: Any) -> None:
    """A user that may touch our keys and run what the scripts run can do everything; what is hidden is None, no error."""
    server = private_redis()
    with redis.Redis(port=server.port) as admin:
        rights = [f"+{name}" for name in COMMANDS + MORE_COMMANDS]
        admin.execute_command("ACL", "SETUSER", "guard", "on", f">{PASSWORD}", "~guard:*", "-@all", *rights)
    store = stores(f"redis://guard:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}/0")
    verbs = Verbs(store)
    verbs.claim()
    fence = verbs.begin(claim="r", lock="L").fence
    verbs.begin(token="t2", claim="r", lock="L")
    assert verbs.begin("o2", "t2", lock="L").outcome is BeginOutcome.BUSY
    verbs.extend(claim="r", lock="L", fence=fence)
    assert store.list_claims()
    assert store.list_locks()
    assert verbs.end(claim="r", lock="L").slot_released
    assert verbs.extend("o5", "t5", lock="L", fence=fence).outcome is ExtendOutcome.RETAKEN
    assert store.force_release_slot("L", "t5")
    assert not store.force_release_slot("L", "t9")
    assert not store.release_claim("r", "o1", ttl=5)
    assert store.sweep() == 0
    store.ping()
    facts = store.facts()
    assert (facts.version, facts.maxmemory_policy, facts.maxmemory, facts.cluster) == (None, None, None, None)


@pytest.mark.parametrize(
    ("rights", "half_done"),
    [(("~other:*", "+@all"), False), (("~guard:*", "-@all"), False), (("~guard:*", "+@all", "-time"), True), (("~guard:*", "+@all", "-zadd"), True)],
)
def test_missing_rights(private_redis: Private, stores: Any, rights: tuple[str, ...], half_done: bool) -> None:
    """A user without the keys or the commands gets an error that says what to give, and whether something may have been written."""
    server = private_redis()
    with redis.Redis(port=server.port) as admin:
        admin.execute_command("ACL", "SETUSER", "poor", "on", ">pw", *rights)
    error = refused(Verbs(stores(f"redis://poor:pw@127.0.0.1:{server.port}/0")).claim)
    assert "lacks rights" in error.message
    assert (error.operation, error.uncertain) == ("claim", half_done)


@pytest.mark.parametrize("login", ["", ":wrong-SECRET@", "nobody:SECRET@"])
def test_wrong_login(private_redis: Private, stores: Any, login: str) -> None:
    """A wrong or missing password is told, with the address but without the password."""
    server = private_redis("--requirepass", "right")
    error = refused(Verbs(stores(f"redis://{login}127.0.0.1:{server.port}/2")).claim)
    assert "check user and password" in error.message
    assert error.address == f"redis://127.0.0.1:{server.port}/2"
    assert error.address in error.message
    assert "SECRET" not in error.message
    assert error.uncertain is False


def test_server_tells_its_facts(private_redis: Private, stores: Any) -> None:
    """Version, kind and eviction policy, as the start-up checks want them."""
    server = private_redis("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru")
    facts = stores(server.url()).facts()
    assert facts.kind in ("redis", "valkey")
    assert facts.version
    assert (facts.maxmemory_policy, facts.maxmemory, facts.cluster) == ("allkeys-lru", 20 * 1024 * 1024, False)


def test_connections_carry_a_name(redis_store: RedisStore, redis_client: redis.Redis) -> None:
    """Operators see in CLIENT LIST whose connections these are."""
    redis_store.ping()
    clients: Any = redis_client.client_list()
    assert any(client["name"].startswith("celery-guard:") for client in clients)


# --------------------------------------------------------------------- what the server forgot


def test_scripts_are_loaded_again(redis_verbs: Verbs, redis_client: redis.Redis) -> None:
    """SCRIPT FLUSH between any two verbs is not noticed."""
    store = redis_verbs.store
    steps: list[Callable[[], Any]] = [
        redis_verbs.claim,
        lambda: redis_verbs.begin(claim="r", lock="L"),
        lambda: redis_verbs.extend(claim="r", lock="L"),
        lambda: redis_verbs.end(claim="r", lock="L"),
        lambda: store.release_claim("r", "o1"),
        store.list_claims,
        store.list_locks,
        store.sweep,
        lambda: store.force_release_slot("L", "t1"),
    ]
    for step in steps:
        redis_client.script_flush()
        step()
    assert store.get_claim("r") is None
    assert store.get_lock("L") is None


def test_emptied_server(private_redis: Private, stores: Any) -> None:
    """The server restarted without its data: held runs take their slots again, under the fence they had, and later fences are greater."""
    server = private_redis()
    verbs = Verbs(stores(server.url()))
    fence = verbs.begin(claim="r", lock="L").fence
    server.restart()
    assert verbs.extend(claim="r", lock="L", fence=fence).outcome is ExtendOutcome.RETAKEN
    assert verbs.begin("o2", "t2", lock="L").outcome is BeginOutcome.BUSY
    verbs.end(lock="L")
    assert (verbs.begin("o2", "t2", lock="L").fence or 0) > (fence or 0)


# ------------------------------------------------------------------------- lost connections


def test_killed_connections(redis_verbs: Verbs, redis_client: redis.Redis) -> None:
    """CLIENT KILL of a resting connection is not noticed."""
    for n in range(3):
        redis_verbs.claim(f"o{n}", resource=f"r{n}")
        clients: Any = redis_client.client_list()
        for client in clients:
            if client["name"].startswith("celery-guard:"):
                redis_client.client_kill(client["addr"])
    assert len(redis_verbs.store.list_claims()) == 3


def test_restart_with_many_resting_connections(private_redis: Private, stores: Any) -> None:
    """After a restart every resting connection is dead; the first verb finds it out for all of them."""
    server = private_redis()
    store = stores(server.url())
    barrier = threading.Barrier(8)

    def claim(n: int) -> None:
        barrier.wait(SOON)
        Verbs(store).claim(resource=f"r{n}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(claim, range(8)))
    server.restart()
    assert Verbs(store).claim().outcome is ClaimOutcome.CLAIMED


def test_server_down(private_redis: Private, stores: Any) -> None:
    """A server that is away is told at once, and the store recovers with it."""
    server = private_redis()
    fresh, used = stores(server.url()), stores(server.url())
    used.ping()
    server.kill()
    error = refused(Verbs(fresh).claim)
    assert (error.operation, error.uncertain) == ("claim", False)
    assert "guard_store_backend" in error.message
    refused(Verbs(used).claim)
    server.restart()
    for store in (fresh, used):
        assert Verbs(store).claim(resource=str(id(store))).outcome is ClaimOutcome.CLAIMED


def test_slow_server(private_redis: Private, stores: Any) -> None:
    """A server that does not answer in time is given up in bounded time, and the command may have been carried out."""
    server = private_redis()
    store = stores(server.url(), command_timeout=0.3, connect_timeout=0.3)
    store.ping()
    with redis.Redis(port=server.port) as admin:
        admin.client_pause(3000)
    error = refused(Verbs(store).claim)
    assert (error.operation, error.uncertain) == ("claim", True)
    assert "in time" in error.message
    # A new connection cannot be made either; nothing was sent, so nothing can have happened.
    assert refused(Verbs(store).claim).uncertain is False


def test_late_answer_is_not_taken_for_the_next(private_redis: Private, stores: Any) -> None:
    """The answer to a command that was given up does not reach the next caller."""
    server = private_redis()
    store = stores(server.url(), command_timeout=0.3)
    verbs = Verbs(store)
    verbs.claim("o1")
    with redis.Redis(port=server.port) as admin:
        admin.client_pause(1000)
        refused(lambda: verbs.claim("o2"))
        admin.ping()  # answered when the pause is over
    assert verbs.claim("o1").outcome is ClaimOutcome.OWN
    assert len(store.list_claims()) == 1


def test_interrupted_read_spoils_its_connection(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's soft time limit may strike between question and answer: the next caller gets its own answer."""
    verbs = Verbs(redis_store)
    verbs.claim()

    class SoftTimeLimit(Exception):
        pass

    (connection,) = redis_store._link._idle

    def struck() -> Any:
        raise SoftTimeLimit

    monkeypatch.setattr(connection, "read_response", struck)
    with pytest.raises(SoftTimeLimit):
        verbs.claim("o2")
    assert connection not in redis_store._link._idle
    connection.disconnect()
    assert verbs.claim().outcome is ClaimOutcome.OWN


def test_forked_child_opens_its_own_connections(redis_store: RedisStore) -> None:
    """Parent and child never talk over one connection."""
    redis_store.ping()
    link = redis_store._link
    (parents,) = link._idle
    link._pid = -1  # as it is seen in a child
    redis_store.ping()
    assert parents not in link._idle
    assert len(link._idle) == 1
    parents.disconnect()


def test_connections_are_used_again(redis_store: RedisStore) -> None:
    """One thread uses one connection, however many verbs and refusals."""
    verbs = Verbs(redis_store)
    for n in range(20):
        verbs.claim(f"o{n}")
        verbs.begin(f"o{n}", claim="r", lock="L", contender=True)
    assert len(redis_store._link._idle) == 1


def test_most_connections(private_redis: Private, stores: Any) -> None:
    """With max_connections threads take turns, and one that waits too long is told which setting to raise."""
    server = private_redis()
    store = stores(server.url(), max_connections=2, command_timeout=5)
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda n: Verbs(store).claim(f"o{n}"), range(200)))
    assert [result.outcome for result in results].count(ClaimOutcome.CLAIMED) == 1
    assert len(store._link._idle) <= 2
    crowded = stores(server.url(), max_connections=1, command_timeout=0.2)
    permits = crowded._link._permits
    assert permits.acquire(timeout=1)
    error = refused(Verbs(crowded).claim)
    permits.release()
    assert "guard_store_max_connections" in error.message
    assert Verbs(crowded).claim("o1").outcome is not None


# ----------------------------------------------------------------------------- wrong servers


def test_replica(private_redis: Private, stores: Any) -> None:
    """A replica refuses; once it is the primary the same store works."""
    primary, replica = private_redis(), private_redis()
    verbs = Verbs(stores(replica.url()))
    replica.command("REPLICAOF", "127.0.0.1", str(primary.port))
    error = refused(verbs.claim)
    assert "primary" in error.message
    assert error.uncertain is False
    replica.command("REPLICAOF", "NO", "ONE")
    assert verbs.claim().outcome is ClaimOutcome.CLAIMED


def test_full_server(private_redis: Private, stores: Any) -> None:
    """A server without memory refuses as a whole: the error says what to raise."""
    server = private_redis("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    error = refused(Verbs(stores(server.url())).claim)
    assert "maxmemory" in error.message


def test_key_of_another_program(redis_verbs: Verbs, redis_client: redis.Redis, key_prefix: str) -> None:
    """A foreign key in our place is named as such."""
    redis_client.set(f"{key_prefix}:1:{{L}}:slots", "mine")
    error = refused(lambda: redis_verbs.begin(lock="L"))
    assert "guard_key_prefix" in error.message


def test_primary_moved(stores: Any) -> None:
    """After a fail-over the old primary answers READONLY: the connections to it are dropped, and a new one finds the new primary."""

    def answer(number: int, words: list[bytes]) -> bytes:
        return b"-READONLY You can't write against a read only replica.\r\n" if number == 1 else b":0\r\n"

    with FakeServer(answer) as server:
        assert Verbs(stores(server.url)).claim().outcome is ClaimOutcome.CLAIMED
        assert len(server.asked) == 2


def test_primary_moved_without_retries(stores: Any) -> None:
    """retries=0 means one attempt."""
    with FakeServer(lambda number, words: b"-READONLY You can't write against a read only replica.\r\n") as server:
        refused(Verbs(stores(server.url, retries=0)).claim)
        assert len(server.asked) == 1


def test_loading_server_is_waited_for(stores: Any) -> None:
    """A server that loads its data after a restart is asked again until it is ready."""
    answers = iter([b"-LOADING Redis is loading the dataset in memory\r\n"] * 3)
    with FakeServer(lambda number, words: next(answers, b":0\r\n")) as server:
        assert Verbs(stores(server.url)).claim().outcome is ClaimOutcome.CLAIMED


def test_loading_server_is_waited_for_in_bounds(stores: Any) -> None:
    """It takes too long: given up after the time of one command."""
    with FakeServer(lambda number, words: b"-LOADING Redis is loading the dataset in memory\r\n") as server:
        error = refused(Verbs(stores(server.url, command_timeout=0.5)).claim)
        assert "loading" in error.message
        assert error.uncertain is False


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (1, 2), (3, 4)])
def test_hang_ups_are_retried_in_bounds(stores: Any, retries: int, attempts: int) -> None:
    """A server that always hangs up is asked retries + 1 times; what became of the command is not known."""
    with FakeServer(lambda number, words: None) as server:
        error = refused(Verbs(stores(server.url, retries=retries)).claim)
        assert error.uncertain is True
        assert len(server.asked) == attempts
        assert len({tuple(words) for words in server.asked}) == 1


def test_answer_that_got_lost(stores: Any) -> None:
    """The first attempt was carried out and its answer lost: the second finds the claim its own, and the caller may publish."""
    with FakeServer(lambda number, words: None if number == 1 else b":1\r\n") as server:
        assert Verbs(stores(server.url)).claim().outcome is ClaimOutcome.OWN


def test_unknown_answers_are_refusals(stores: Any) -> None:
    """An error that nobody foresaw is StoreUnavailable with the server's own words, never redis-py's exception."""
    with FakeServer(lambda number, words: b"-FANCY new trouble\r\n") as server:
        assert "new trouble" in refused(Verbs(stores(server.url)).claim).message


@pytest.mark.parametrize("word", ["MOVED 1 127.0.0.1:1", "CROSSSLOT Keys in request don't hash to the same slot"])
def test_cluster_node(stores: Any, word: str) -> None:
    """A cluster node is not a single server, and the error says so."""
    with FakeServer(lambda number, words: f"-{word}\r\n".encode()) as server:
        assert "Cluster is not part of this version" in refused(Verbs(stores(server.url)).claim).message


def test_facts_where_commands_are_unknown(stores: Any) -> None:
    """Hosted servers rename CONFIG: that is no error."""
    with FakeServer(lambda number, words: b"-ERR unknown command '%s'\r\n" % words[0]) as server:
        facts = stores(server.url).facts()
        assert (facts.version, facts.maxmemory_policy) == (None, None)


def test_facts_where_the_server_fails(stores: Any) -> None:
    """Any other refusal is one."""
    with FakeServer(lambda number, words: b"-ERR broken\r\n") as server:
        assert "broken" in refused(stores(server.url).facts).message


def test_no_redis_at_all(stores: Any) -> None:
    """Another protocol on the port."""
    with FakeServer(lambda number, words: b"HTTP/1.1 400 Bad Request\r\n\r\n") as server:
        refused(Verbs(stores(server.url)).claim)
