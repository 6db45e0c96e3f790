"""The Redis store as a whole: where it is made and closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_guard.stores.redis.connect import parse
from celery_guard.stores.redis.link import Link
from celery_guard.stores.redis.operators import RedisOperators

__all__ = ["RedisStore"]


class RedisStore(RedisOperators):
    """``GuardStore`` on one Redis or Valkey server.

    Opens no connection before the first verb. May be used by many threads; a forked child opens
    connections of its own.
    """

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        prefix: str = "guard",
        connect_timeout: float = 2.0,
        command_timeout: float = 5.0,
        retries: int = 1,
        max_connections: int | None = None,
        client_options: Mapping[str, Any] | None = None,
    ) -> RedisStore:
        """Make a store from the address of its server.

        Args:
            url: See ``connect.parse``.
            prefix: First part of all keys.
            connect_timeout: Longest wait for a connection, in seconds.
            command_timeout: Longest wait for an answer, in seconds; also how long a server that still loads its data is waited for.
            retries: How often a command whose connection broke is sent again. A command that timed out is not.
            max_connections: Most connections at a time; None: as many as there are threads.
            client_options: More arguments for redis-py's connections, such as Celery's ``broker_use_ssl``.

        Raises:
            ConfigurationError: If the address or an option is not understood.
        """
        target = parse(url, connect_timeout=connect_timeout, command_timeout=command_timeout, client_options=client_options)
        return cls(Link(target, command_timeout=command_timeout, retries=retries, max_connections=max_connections), prefix)

    @property
    def address(self) -> str:
        """The server for people and logs, never with a password."""
        return self._link.target.address

    def close(self) -> None:
        """Drop the connections; the store may be used again, with new ones."""
        self._link.close()

    def __repr__(self) -> str:
        return f"RedisStore({self.address!r})"
