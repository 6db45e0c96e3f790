"""Addresses of a Redis server: what a URL means to Celery means the same here.

Parses the URL forms that kombu and redis-py know into the arguments of a redis-py connection. A URL
that would silently lead elsewhere (a raw ``#`` in a password makes both fall back to localhost) is
refused instead. Opens nothing.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import ParseResult, parse_qsl, unquote, urlparse

import redis

from celery_guard.errors import ConfigurationError

__all__ = ["Connection", "Target", "parse"]

_TCP = {"redis": False, "rediss": True, "valkey": False, "valkeys": True}
_SOCKET = ("unix", "redis+socket")
_LATER = ("sentinel", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "cluster")
_DB_NAMES = ("db", "virtual_host")
_ENCODE = "percent-encode special characters in user and password (# is %23, @ is %40, / is %2F, ? is %3F, % is %25, space is %20)"
_CERT_REQS = {
    "required": ssl.CERT_REQUIRED,
    "optional": ssl.CERT_OPTIONAL,
    "none": ssl.CERT_NONE,
}
_NO = ("0", "false", "f", "no", "n", "off")


class Connection(Protocol):
    """What the store uses of a redis-py connection, the same in versions 5 to 8."""

    def connect(self) -> None:
        """Connect, log in and select the database, unless that is done."""

    def disconnect(self) -> None:
        """Close the socket."""

    def send_command(self, *args: str) -> None:
        """Pack and send one command."""

    def send_packed_command(self, command: Sequence[bytes], check_health: bool = True) -> None:
        """Send what is packed already."""

    def read_response(self) -> Any:
        """Wait for one answer; raises what the server answers as an error."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect, and how.

    Attributes:
        address: The server for people, without user and password.
        connection_class: Connection class of redis-py.
        options: Keyword arguments of that class, credentials included.
    """

    address: str
    connection_class: Callable[..., Connection]
    options: dict[str, Any] = field(repr=False)

    def open(self) -> Connection:
        """Make a connection object; it connects with its first use."""
        return self.connection_class(**self.options)


def parse(url: str, *, connect_timeout: float, command_timeout: float, client_options: Mapping[str, Any] | None = None) -> Target:
    """Turn a URL into a target.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://`` or kombu's ``redis+socket://``; user and password
            percent-encoded; the database in the path or in ``?db=`` (``?virtual_host=``); ``ssl_*`` in the query.
        connect_timeout: Longest wait for a connection, in seconds.
        command_timeout: Longest wait for the server to take or answer a command, in seconds.
        client_options: More arguments for redis-py's connection, such as Celery's ``broker_use_ssl``;
            they win over the URL. Any ``ssl_*`` argument turns TLS on.

    Raises:
        ConfigurationError: If the URL is not understood; the text never holds the password.
    """
    scheme, parts = _split(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    options: dict[str, Any] = {"username": unquote(parts.username or "") or None, "password": unquote(parts.password or "") or None}
    options["db"] = _database(scheme, parts, query)
    tls = {name: _tls_option(name, query.pop(name)) for name in list(query) if name.startswith("ssl_")}
    if query:
        raise ConfigurationError(
            f"the store URL {scheme}://… has unknown options {', '.join(sorted(query))}; known are db, virtual_host and ssl_*, "
            "pass others in guard_store_transport_options"
        )
    extra = dict(client_options or {})
    secure = extra.pop("ssl", None)
    tls.update({name: _tls_option(name, extra.pop(name)) for name in list(extra) if name.startswith("ssl_")})
    options.update(socket_timeout=command_timeout, protocol=2)
    if scheme in _SOCKET:
        if tls or secure:
            raise ConfigurationError(f"the store URL {scheme}://… is a unix socket, which has no TLS; drop the ssl options or use rediss://")
        options["path"] = unquote(parts.path)
        cls: Callable[..., Connection] = redis.UnixDomainSocketConnection
        address = f"unix://{options['path']}?db={options['db']}"
    else:
        options.update(host=unquote(parts.hostname or "") or "localhost", port=parts.port or 6379)
        options.update(socket_connect_timeout=connect_timeout, socket_keepalive=True)
        encrypted = _TCP[scheme] or bool(tls) or bool(secure)
        cls = redis.SSLConnection if encrypted else redis.Connection
        options.update(tls)
        host = f"[{options['host']}]" if ":" in options["host"] else options["host"]
        address = f"{'rediss' if encrypted else 'redis'}://{host}:{options['port']}/{options['db']}"
    options.update(extra)
    _check(cls, options, address)
    return Target(address, cls, options)


def _split(url: str) -> tuple[str, ParseResult]:
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator:
        raise ConfigurationError("the store URL has no scheme; write for example redis://localhost:6379/2")
    if scheme in _LATER or ";" in rest:
        raise ConfigurationError(f"the store URL {scheme}://…: Sentinel, Cluster and lists of servers are not part of this version; name one Redis server")
    if scheme not in _TCP and scheme not in _SOCKET:
        raise ConfigurationError(f"the store URL has the unknown scheme {scheme!r}; use one of {', '.join((*_TCP, *_SOCKET))}")
    if "#" in rest:
        raise ConfigurationError(f"the store URL {scheme}://… holds a raw '#', behind which everything would be ignored; {_ENCODE}")
    if any(char.isspace() or not char.isprintable() for char in rest):
        raise ConfigurationError(f"the store URL {scheme}://… holds a space or control character; {_ENCODE}")
    try:
        # A fixed scheme gives the same rules to all, as kombu does.
        parts = urlparse("http://" + rest)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_is_valid = False
        parts = urlparse("http://")
    if not port_is_valid:
        raise ConfigurationError(f"the store URL {scheme}://… has no valid host and port; if the password has special characters, {_ENCODE}")
    if parts.netloc.count("@") > 1 or (scheme in _TCP and ("@" in parts.path or "@" in parts.query)):
        raise ConfigurationError(f"the store URL {scheme}://… holds an unescaped '@', '/' or '?' in its user or password; {_ENCODE}")
    if scheme in _SOCKET and (parts.hostname or len(parts.path) < 2):
        raise ConfigurationError(f"the store URL {scheme}://… names no socket; write {scheme}:///path/to/redis.sock with three slashes")
    return scheme, parts


def _database(scheme: str, parts: ParseResult, query: dict[str, str]) -> int:
    named = [query.pop(name) for name in _DB_NAMES if name in query]
    value = named[0] if named else unquote(parts.path).strip("/") if scheme in _TCP else ""
    if not value:
        return 0
    if not value.isdecimal():
        raise ConfigurationError(f"the store URL {scheme}://… names the database {value!r}; it must be a number, as in redis://localhost:6379/2")
    return int(value)


def _tls_option(name: str, value: Any) -> Any:
    if name == "ssl_cert_reqs" and isinstance(value, str):
        wanted = value.lower().removeprefix("cert_")
        if wanted not in _CERT_REQS:
            raise ConfigurationError(f"{name}={value!r} is unknown; use required, optional or none")
        return _CERT_REQS[wanted]
    if name == "ssl_check_hostname" and isinstance(value, str):
        return value.lower() not in _NO
    return value


def _check(cls: Callable[..., Connection], options: Mapping[str, Any], address: str) -> None:
    try:
        cls(**options)
    except (TypeError, ValueError, redis.RedisError) as exc:
        raise ConfigurationError(f"redis-py does not take the options of store {address}: {exc}; correct guard_store_transport_options") from exc
