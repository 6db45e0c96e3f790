"""Addresses of the store: which are accepted, and how they are shown without passwords."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from celery_guard.validation import listed

__all__ = ["MASK", "SCHEMES", "WORDS", "check_backend", "redact", "redact_url"]

MASK = "********"
#: Words that stand for an address.
WORDS = ("broker", "result", "memory")
#: Schemes of redis-py.
SCHEMES = ("redis", "rediss", "unix")
LATER_SCHEMES = ("sentinel", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "rediscluster")
ALIASES = {"valkey": "redis", "valkeys": "rediss", "redis+socket": "unix", "redis+unix": "unix", "valkey+socket": "unix"}
#: Parameters of a URL that a setting decides, or that would break the store.
RESERVED_PARAMETERS = ("socket_timeout", "timeout", "socket_connect_timeout", "max_connections", "decode_responses")
_SECRET = re.compile(r"pass|secret|token|credential", re.IGNORECASE)
_ENCODE = "percent-encode special characters in user and password: # is %23, / is %2F, ? is %3F, @ is %40"


def redact_url(url: str) -> str:
    """Return a URL (or anything that was given for one) without the passwords in it.

    Masks too much rather than too little: everything up to the last ``@`` counts as user and
    password, so that an unescaped ``#`` or ``/`` in a password does not lay it open.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    userinfo, at, tail = rest.rpartition("@")
    if at:
        user, colon, _ = userinfo.partition(":")
        rest = (f"{user}:{MASK}" if colon and separator else MASK) + "@" + tail
    rest = re.sub(r"([?&][^=&]*(?:pass|secret|token|credential)[^=&]*=)[^&#]*", rf"\g<1>{MASK}", rest, flags=re.IGNORECASE)
    return scheme + separator + rest


def redact(name: str, value: Any) -> Any:
    """Return a value for people: passwords in URLs, and values with a telling name, are masked.

    Args:
        name: Name of the setting or key that carries the value.
        value: The value; mappings and lists are gone through.
    """
    if isinstance(value, Mapping):
        return {key: redact(str(key), item) for key, item in value.items()}
    if value is not None and _SECRET.search(name):
        return MASK
    if isinstance(value, list | tuple):
        return [redact(name, item) for item in value]
    if isinstance(value, bytes):
        return redact(name, value.decode("utf-8", "replace"))
    return redact_url(value) if isinstance(value, str) else value


def check_backend(value: Any) -> str:
    """Check the address of the lock store.

    Raises:
        ValueError: With what is wrong, whatever its type, and the remedy; never with the password.
    """
    if isinstance(value, list | tuple):
        raise ValueError("several servers (Redlock) are not part of this version; give one Redis URL")  # noqa: TRY004
    if not isinstance(value, str):
        raise ValueError("must be a text: a Redis URL, or " + listed(WORDS))  # noqa: TRY004
    if value in WORDS:
        return value
    scheme, separator, _ = value.partition("://")
    if not separator:
        near = difflib.get_close_matches(value.lower(), WORDS, 1)
        raise ValueError(f"did you mean {near[0]!r}?" if near else f"is no URL; write for example 'redis://localhost:6379/2', or one of {listed(WORDS)}")
    if scheme in LATER_SCHEMES:
        raise ValueError(f"{scheme}:// is not part of this version; give the redis:// URL of one server")
    if scheme in ALIASES:
        raise ValueError(f"write {ALIASES[scheme]}:// instead of {scheme}://")
    if scheme not in SCHEMES:
        near = difflib.get_close_matches(scheme, SCHEMES, 1)
        raise ValueError(f"must begin with redis://, rediss:// or unix://{f'; did you mean {near[0]}://?' if near else ''}")
    _check_url(value)
    return value


def _check_url(url: str) -> None:
    # A "#" begins a fragment, which redis-py and kombu drop without a word: they would go to localhost with half a password.
    if "#" in url:
        raise ValueError(f"contains a raw #; {_ENCODE}")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # reading it checks it
    except ValueError:
        raise ValueError(f"has no valid host and port; {_ENCODE}") from None
    if "@" not in parts.netloc and ("@" in parts.query.partition("=")[0] or (parts.scheme != "unix" and "@" in parts.path)):
        raise ValueError(f"has an @ behind its host; {_ENCODE}")
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    secret = next((name for name in parameters if _SECRET.search(name)), None)
    if secret:
        raise ValueError(f"carries {secret!r} in its query, where reports show it; write {parts.scheme}://user:password@…")
    taken = [name for name in RESERVED_PARAMETERS if name in parameters]
    if taken:
        raise ValueError(f"must not set {listed(taken)}; use guard_store_timeout, guard_store_connect_timeout and guard_store_max_connections")
    # redis-py takes database 0 when it cannot read the number.
    database = parameters.get("db", "" if parts.scheme == "unix" else parts.path.strip("/"))
    if database and not database.isdecimal():
        raise ValueError(f"names the database {database!r}; it must be a number, for example {parts.scheme}://localhost:6379/2")
    if parts.scheme == "unix" and parts.path in ("", "/"):
        raise ValueError("names no socket; write for example 'unix:///run/redis.sock?db=2'")
