"""Addresses of the store: what is accepted, and that no password is shown."""

from __future__ import annotations

from typing import Any

import pytest

from celery_guard.addresses import MASK, check_backend, redact, redact_url


@pytest.mark.parametrize(
    "value",
    [
        "broker",
        "result",
        "memory",
        "redis://localhost",
        "redis://localhost/",
        "redis://localhost:6379/2",
        "redis://:p%23w@localhost:6379/0",
        "redis://user:pw@[::1]:6379/15?health_check_interval=30",
        "redis://localhost?db=3",
        "redis://localhost/0?client_name=a@b",
        "rediss://user:pw@cache.example.com:6380/0?ssl_cert_reqs=required&ssl_ca_certs=/etc/ca.pem",
        "unix:///run/redis.sock?db=2",
        "unix://user:pw@/run/redis@1.sock",
    ],
)
def test_accepted(value: str) -> None:
    """Words and URLs of one Redis server are taken as they are."""
    assert check_backend(value) == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("redis://:a#b@h:6379/0", "raw #; percent-encode"),
        ("redis://:a/b@h:6379/0", "percent-encode"),
        ("redis://:a?b@h:6379/0", "percent-encode"),
        ("redis://user:12/3@h:6379/0", "an @ behind its host; percent-encode"),
        ("redis://user:12?3@h:6379/0", "an @ behind its host; percent-encode"),
        ("redis://h:port/0", "no valid host and port"),
        ("redis://h:99999/0", "no valid host and port"),
        ("redis://[::1/0", "no valid host and port"),
        ("redis://h/shop", "names the database 'shop'; it must be a number"),
        ("redis://h/0/1", "it must be a number"),
        ("redis://h?db=x", "it must be a number"),
        ("redis://h/0?password=pw", "carries 'password' in its query"),
        ("unix:///run/redis.sock?password=pw", "write unix://user:password@"),
        ("redis://h/0?decode_responses=True", "must not set 'decode_responses'"),
        ("redis://h/0?socket_timeout=90", "use guard_store_timeout"),
        ("unix://", "names no socket"),
        ("localhost:6379", "is no URL; write for example 'redis://localhost:6379/2'"),
        ("Broker", "did you mean 'broker'?"),
        ("memroy", "did you mean 'memory'?"),
        ("reds://h", "did you mean redis://?"),
        ("amqp://h", "must begin with redis://, rediss:// or unix://"),
        ("valkey://h", "write redis:// instead of valkey://"),
        ("redis+socket:///run/redis.sock", "write unix:// instead of redis+socket://"),
        ("sentinel://h:26379", "not part of this version"),
        ("redis+cluster://h", "not part of this version"),
        (["redis://:pw@a", "redis://:pw@b"], "(Redlock) are not part of this version"),
        (b"redis://h", "must be a text"),
        (5, "must be a text"),
    ],
)
def test_refused(value: Any, words: str) -> None:
    """A wrong address is refused with the remedy: nobody is sent to localhost or database 0 instead, and no password is told."""
    with pytest.raises(ValueError) as caught:
        check_backend(value)
    assert words in str(caught.value)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret@h:6379/2",
        "redis://user:s3cret@h:6379/2",
        "redis://s3cret@h/2",
        "redis://:s3c#ret@h:6379/2",
        "redis://:s3c/ret@h:6379/2",
        "redis://:s3c?ret@h:6379/2",
        "redis://:s3c@ret@h:6379/2",
        "redis://:s3://cret@h:6379/2",
        "redis://h:6379/2?password=s3cret&db=2",
        "unix:///run/redis.sock?PASSWORD=s3cret",
        "redis://h/2?ssl_password=s3cret",
        "sentinel://:s3cret@a:1;sentinel://:s3cret@b:2",
        ":s3cret@h:6379",
    ],
)
def test_no_password_is_shown(url: str) -> None:
    """Whatever is wrong with a URL, its password is masked."""
    shown = redact_url(url)
    assert MASK in shown
    for part in ("s3c", "ret@", "cret"):
        assert part not in shown


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://user:pw@h:6379/2?db=1", f"redis://user:{MASK}@h:6379/2?db=1"),
        ("redis://h:6379/2", "redis://h:6379/2"),
        ("broker", "broker"),
        ("", ""),
    ],
)
def test_the_rest_stays_readable(url: str, expected: str) -> None:
    """Server, database and user name are shown: people need them."""
    assert redact_url(url) == expected


def test_redact_goes_into_containers() -> None:
    """Telling names and URLs are masked at any depth, and values of other types pass."""
    value = {
        "password": "pw",
        "ssl_password": None,
        "nested": {"auth_token": "pw", "url": "redis://:pw@h"},
        "list": ["redis://:pw@h", 5],
        "raw": b"redis://:pw@h",
    }
    shown = redact("guard_store_transport_options", value)
    assert shown == {
        "password": MASK,
        "ssl_password": None,
        "nested": {"auth_token": MASK, "url": f"redis://:{MASK}@h"},
        "list": [f"redis://:{MASK}@h", 5],
        "raw": f"redis://:{MASK}@h",
    }
