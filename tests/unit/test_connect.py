"""Addresses of the store's server: the same server as Celery would take, or an error that says what to write."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
import redis
from kombu.utils.url import url_to_parts

from celery_guard.errors import ConfigurationError
from celery_guard.stores.redis import RedisStore
from celery_guard.stores.redis.connect import Target, parse


def target(url: str, **client_options: Any) -> Target:
    return parse(url, connect_timeout=2, command_timeout=5, client_options=client_options)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", ("localhost", 6379, 0, None, None)),
        ("redis:///3", ("localhost", 6379, 3, None, None)),
        ("redis://h:7000/3", ("h", 7000, 3, None, None)),
        ("redis://h?db=4", ("h", 6379, 4, None, None)),
        ("redis://h/?virtual_host=4", ("h", 6379, 4, None, None)),
        ("redis://:pw@h/1", ("h", 6379, 1, None, "pw")),
        ("redis://user:pw@h/1", ("h", 6379, 1, "user", "pw")),
        ("redis://user:pw@h/", ("h", 6379, 0, "user", "pw")),
        ("redis://:p%23%40%2F%25x@h:6379/3", ("h", 6379, 3, None, "p#@/%x")),
        ("redis://us%3Aer:p+w%20d@h", ("h", 6379, 0, "us:er", "p+w d")),
        ("redis://:a:b@h", ("h", 6379, 0, None, "a:b")),
        ("redis://[::1]:7000/2", ("::1", 7000, 2, None, None)),
        ("REDIS://h/1", ("h", 6379, 1, None, None)),
        ("valkey://h/1", ("h", 6379, 1, None, None)),
    ],
)
def test_tcp(url: str, expected: tuple[Any, ...]) -> None:
    """Host, port, database, user and password of every form of a TCP address."""
    options = target(url).options
    assert tuple(options[name] for name in ("host", "port", "db", "username", "password")) == expected


@pytest.mark.parametrize("url", ["redis://:p%23%40%2F%25x@h:6379/3", "redis://us%3Aer:p+w%20d@h:1/2", "redis://u:%C3%BC@h:1/0", "redis://:50%off@h:1/1"])
def test_same_as_celery(url: str) -> None:
    """User, password, host and port are what kombu reads from the same URL."""
    parts, options = url_to_parts(url), target(url).options
    assert (options["host"], options["port"], options["username"], options["password"]) == (parts.hostname, parts.port, parts.username, parts.password)
    assert str(options["db"]) == parts.path


@pytest.mark.parametrize(
    ("url", "path", "db"),
    [
        ("unix:///run/redis.sock", "/run/redis.sock", 0),
        ("unix:///run/redis.sock?db=2", "/run/redis.sock", 2),
        ("redis+socket:///run/my%20redis.sock?virtual_host=2", "/run/my redis.sock", 2),
        ("unix://user:p%23w@/run/redis.sock", "/run/redis.sock", 0),
    ],
)
def test_unix_socket(url: str, path: str, db: int) -> None:
    """redis-py's and kombu's ways to write a unix socket."""
    found = target(url)
    assert (found.options["path"], found.options["db"]) == (path, db)
    assert found.connection_class is redis.UnixDomainSocketConnection
    assert found.address == f"unix://{path}?db={db}"
    if "@" in url:
        assert (found.options["username"], found.options["password"]) == ("user", "p#w")


SECRET = "sEcr3t"


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        (f"redis://:{SECRET}#b@h:6379/0", "percent-encode"),
        (f"redis://h/0#{SECRET}", "percent-encode"),
        (f"redis://:{SECRET}@b@h:6379/0", "percent-encode"),
        (f"redis://:{SECRET}/b@h:6379/0", "percent-encode"),
        (f"redis://:12/{SECRET}@h:6379/0", "percent-encode"),
        (f"redis://:12?{SECRET}@h:6379/0", "percent-encode"),
        (f"redis://:{SECRET} b@h:6379/0", "percent-encode"),
        (f"redis://:{SECRET}[b@h:6379/0", "percent-encode"),
        (f"redis://u:{SECRET}\n@h", "percent-encode"),
        (f"redis://u:{SECRET}@h:port", "percent-encode"),
        (f"redis://u:{SECRET}@h:99999", "percent-encode"),
        (f"redis://u:{SECRET}@h/zero", "must be a number"),
        (f"redis://u:{SECRET}@h/-1", "must be a number"),
        (f"redis://u:{SECRET}@h?dbb=1", "unknown options dbb"),
        (f"sentinel://u:{SECRET}@h:26379;sentinel://h2", "not part of this version"),
        (f"redis+cluster://u:{SECRET}@h", "not part of this version"),
        (f"redis://u:{SECRET}@h;redis://h2", "not part of this version"),
        (f"amqp://u:{SECRET}@h", "unknown scheme 'amqp'"),
        (f"u:{SECRET}@h:6379", "no scheme"),
        ("unix://run/redis.sock", "three slashes"),
        ("unix://", "three slashes"),
        ("unix:///s.sock?ssl_cert_reqs=none", "unix socket, which has no TLS"),
        (f"rediss://u:{SECRET}@h?ssl_cert_reqs=maybe", "required, optional or none"),
    ],
)
def test_wrong_address(url: str, remedy: str) -> None:
    """An address that would lead elsewhere is refused with the remedy, and without the password."""
    with pytest.raises(ConfigurationError) as caught:
        target(url)
    assert remedy in caught.value.message
    assert SECRET not in caught.value.message


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("rediss://h", {}, {}),
        ("rediss://h?ssl_cert_reqs=CERT_NONE&ssl_check_hostname=false", {}, {"ssl_cert_reqs": ssl.CERT_NONE, "ssl_check_hostname": False}),
        ("rediss://h?ssl_cert_reqs=required&ssl_ca_certs=/ca.pem", {}, {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/ca.pem"}),
        ("redis://h", {"ssl_cert_reqs": ssl.CERT_OPTIONAL, "ssl_keyfile": "/k"}, {"ssl_cert_reqs": ssl.CERT_OPTIONAL, "ssl_keyfile": "/k"}),
        ("rediss://h?ssl_ca_certs=/url.pem", {"ssl_ca_certs": "/option.pem"}, {"ssl_ca_certs": "/option.pem"}),
        ("redis://h", {"ssl": True}, {}),
    ],
)
def test_tls(url: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    """TLS by scheme, by URL and by Celery's dict of options, which wins."""
    found = target(url, **options)
    assert found.connection_class is redis.SSLConnection
    assert found.address == "rediss://h:6379/0"
    assert {name: found.options[name] for name in expected} == expected
    found.open()


def test_plain_by_default() -> None:
    """redis:// alone is no TLS; time-outs and other options reach the connection."""
    found = target("redis://h", health_check_interval=7)
    assert found.connection_class is redis.Connection
    assert (found.options["socket_connect_timeout"], found.options["socket_timeout"], found.options["health_check_interval"]) == (2, 5, 7)


def test_unknown_client_option() -> None:
    """An option that redis-py does not have is found at once, not with the first dispatch."""
    with pytest.raises(ConfigurationError, match="guard_store_transport_options"):
        target("redis://h", no_such_option=1)


@pytest.mark.parametrize("url", [f"redis://user:{SECRET}@h:1/2", f"rediss://:{SECRET}@h:1/2", f"unix://u:{SECRET}@/s?db=2"])
def test_password_is_never_shown(url: str) -> None:
    """Neither the address nor any repr carries user or password."""
    store = RedisStore.from_url(url)
    for text in (store.address, repr(store), str(target(url)), repr(target(url))):
        assert SECRET not in text
        assert "user" not in text
    assert store.address.endswith("2")
