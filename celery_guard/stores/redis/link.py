"""The link to one Redis server: connections, retries, and what failures are called.

Uses redis-py's connections, which know TLS, credentials and the protocol, but neither its pool nor
its client: together they cost a dispatch more CPU than everything else in the store.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis
from redis.exceptions import AuthenticationError, AuthorizationError, BusyLoadingError, NoPermissionError, NoScriptError, ResponseError

from celery_guard.errors import StoreUnavailable
from celery_guard.stores.redis.connect import Connection, Target
from celery_guard.stores.redis.scripts import SCRIPTS, pack

__all__ = ["Link"]

#: Waits while a server loads its data grow from the first to the second (seconds).
_LOADING_WAIT = (0.05, 0.5)
_CLUSTER = "it is a cluster node; Redis Cluster is not part of this version, name a single server"
_RIGHTS = "its user lacks rights: give it the keys of guard_key_prefix, and EVALSHA, EVAL, TIME and the commands on strings, hashes and sorted sets"
#: What to do about a refusal, by a word in it. Redis-py takes the server's code off and puts it into the exception's
#: class; where a script ran, servers before version 7 have it somewhere in the text.
_REMEDIES = (
    (("ReadOnlyError", "READONLY"), "it is a replica; point guard_store_backend at the primary"),
    (("MasterDownError", "MASTERDOWN"), "it is a replica without its primary; point guard_store_backend at the primary"),
    (("OutOfMemoryError", "OOM"), "its memory is full; raise maxmemory (the store needs the policy noeviction)"),
    (("MISCONF",), "it cannot save its data; look into its log"),
    (("MovedError", "MOVED", "ClusterCrossSlotError", "CROSSSLOT"), _CLUSTER),
    (("WRONGTYPE",), "a key of another program has the name of ours; set another guard_key_prefix"),
    (("NoPermissionError", "NOPERM", "ACL failure", "can't run this command", "can't access"), _RIGHTS),
    (("unknown command",), "it is older than Redis 6.2 or has commands renamed; use Redis 6.2 or later, or Valkey"),
)


def _is_about(exc: ResponseError, *words: str) -> bool:
    told = f"{type(exc).__name__}: {exc}"
    return any(word in told for word in words)


def _is_replica(exc: ResponseError) -> bool:
    return _is_about(exc, *_REMEDIES[0][0])


class Link:
    """Talks to one server; may be used by many threads.

    Args:
        target: Where to connect.
        command_timeout: How long a server that still loads its data is waited for, in seconds.
        retries: How often a command whose connection broke is sent again, on a new connection.
        max_connections: Most connections at a time; None: as many as threads ask for.
    """

    def __init__(self, target: Target, *, command_timeout: float, retries: int, max_connections: int | None) -> None:
        self.target = target
        self._command_timeout = command_timeout
        self._retries = retries
        self._max_connections = max_connections
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        # The one used last comes first: the others may rest, and be closed by the server.
        self._idle: deque[Connection] = deque()
        self._permits = None if self._max_connections is None else threading.BoundedSemaphore(self._max_connections)

    def close(self) -> None:
        """Drop the connections that rest; new ones are opened when needed."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                return
            connection.disconnect()

    def run(self, name: str, keys: Sequence[str], args: Sequence[str]) -> Any:
        """Run a script of ``SCRIPTS``. One round trip, two when the server did not know it."""
        by_hash, by_text = SCRIPTS[name].call(keys, args)
        return self._exchange(name, by_hash, by_text)

    def command(self, *parts: str) -> Any:
        """Send a plain command.

        Raises:
            NoPermissionError: If the user may not use it.
            StoreUnavailable: For everything else.
        """
        return self._exchange(parts[0], b"*%d\r\n%b" % (len(parts), pack(parts)), None)

    # ------------------------------------------------------------------------------ inside

    def _exchange(self, operation: str, message: bytes, by_text: bytes | None) -> Any:
        if self._pid != os.getpid():
            self._reset()  # a forked child must not talk over its parent's connections
        permits = self._permits
        if permits is not None and not permits.acquire(timeout=self._command_timeout):
            raise self._unavailable(operation, f"all {self._max_connections} connections are in use; raise guard_store_max_connections", False)
        try:
            return self._attempts(operation, message, by_text)
        finally:
            if permits is not None:
                permits.release()

    def _attempts(self, operation: str, message: bytes, by_text: bytes | None) -> Any:
        retries, uncertain, sent = self._retries, False, False
        loading_until, wait = 0.0, _LOADING_WAIT[0]
        while True:
            sent = False
            try:
                connection = self._take()
                sent = True
                return self._ask(connection, message, by_text)
            except BusyLoadingError as exc:
                now = time.monotonic()
                loading_until = loading_until or now + self._command_timeout
                if now + wait > loading_until:
                    raise self._unavailable(operation, "it is still loading its data; try again later", uncertain) from exc
                time.sleep(wait)
                wait = min(wait * 2, _LOADING_WAIT[1])
            except (AuthenticationError, AuthorizationError) as exc:
                raise self._unavailable(operation, f"it refused the login ({exc}); check user and password of guard_store_backend", uncertain) from exc
            except ResponseError as exc:
                if not _is_replica(exc) or retries <= 0:
                    raise self._refused(operation, exc, uncertain) from exc
                # The primary moved: the address may lead to the new one by now.
                self.close()
                retries -= 1
            except (redis.TimeoutError, TimeoutError) as exc:
                # Not tried again: the caller has waited its whole time already.
                text = "it did not answer in time" if sent else "no connection in time"
                raise self._unavailable(operation, f"{text} ({exc}); check that it runs and is not overloaded", uncertain or sent) from exc
            except (redis.ConnectionError, OSError) as exc:
                uncertain = uncertain or sent
                # One broken connection seldom comes alone: the server restarted.
                self.close()
                if not sent or retries <= 0:
                    raise self._unavailable(operation, f"{exc}; check that it runs and that guard_store_backend names it", uncertain) from exc
                retries -= 1
            except redis.RedisError as exc:
                raise self._unavailable(operation, f"{type(exc).__name__}: {exc}", True) from exc

    def _take(self) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:
            connection = self.target.open()
        connection.connect()
        try:
            connection.send_command("CLIENT", "SETNAME", f"celery-guard:{self._pid}")
            connection.read_response()
        except ResponseError:
            pass  # a name is a comfort for operators; the user may lack the right to set it
        return connection

    def _ask(self, connection: Connection, message: bytes, by_text: bytes | None) -> Any:
        # A connection goes back only when its answer has been read: an exception out of a signal handler
        # (Celery's soft time limit) may strike between the two, and the next caller must not get that answer.
        try:
            connection.send_packed_command([message], check_health=False)
            reply = connection.read_response()
        except NoScriptError:
            if by_text is None:
                raise
            connection.send_packed_command([by_text], check_health=False)
            reply = connection.read_response()
        except ResponseError as exc:
            if not _is_replica(exc):
                self._idle.append(connection)
            raise
        self._idle.append(connection)
        return reply

    def _refused(self, operation: str, exc: ResponseError, uncertain: bool) -> Exception:
        if isinstance(exc, NoPermissionError) and operation not in SCRIPTS:
            return exc
        remedy = next((remedy for words, remedy in _REMEDIES if _is_about(exc, *words)), "look up this answer in the server's documentation")
        # A script that fails half-way leaves what it has written; on a replica and without memory it writes nothing.
        half_done = "script" in str(exc) and not _is_about(exc, *_REMEDIES[0][0], *_REMEDIES[2][0])
        return self._unavailable(operation, f"it refused the command ({exc}): {remedy}", uncertain or half_done)

    def _unavailable(self, operation: str, text: str, uncertain: bool) -> StoreUnavailable:
        address = self.target.address
        return StoreUnavailable(f"lock store {address}: {operation} failed: {text}", operation=operation, address=address, uncertain=uncertain)
