"""Operators' side of the Redis store: lists, forced releases, sweeping, facts about the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import NoPermissionError

from celery_guard.decisions import ClaimInfo, Holder, LockInfo, ServerFacts
from celery_guard.errors import StoreUnavailable
from celery_guard.keys import redis_key
from celery_guard.stores.redis.claims import CLAIM_STATES
from celery_guard.stores.redis.executions import RedisExecutions
from celery_guard.stores.redis.scripts import text

__all__ = ["RedisOperators"]

#: Index entries that one script reads or drops, so that it never holds up the server.
_CHUNK = 1000
_HOLDER_FIELDS = 6


class RedisOperators(RedisExecutions):
    """``OperatorStore`` on one Redis server."""

    def list_claims(self, limit: int = 1000, after: str | None = None) -> list[ClaimInfo]:
        """See ``OperatorStore.list_claims``; an ``after`` that is gone by now begins with the first."""
        shown: list[ClaimInfo] = []
        for page in self._pages(self._claims, limit, after):
            shown += self._read_claims(page)
            if len(shown) >= limit:
                break
        return shown[:limit]

    def get_claim(self, resource: str) -> ClaimInfo | None:
        """See ``OperatorStore.get_claim``."""
        return next(iter(self._read_claims((resource,))), None)

    def list_locks(self, limit: int = 1000, after: str | None = None) -> list[LockInfo]:
        """See ``OperatorStore.list_locks``; an ``after`` that is gone by now begins with the first."""
        shown: list[LockInfo] = []
        for page in self._pages(self._locks, limit, after):
            shown += (lock for lock in self._read_locks(page) if lock.holders)
            if len(shown) >= limit:
                break
        return shown[:limit]

    def get_lock(self, resource: str) -> LockInfo | None:
        """See ``OperatorStore.get_lock``; None where nobody holds it."""
        return next((lock for lock in self._read_locks((resource,)) if lock.holders), None)

    def force_release_claim(self, resource: str, owner: str) -> bool:
        """See ``OperatorStore.force_release_claim``."""
        return self.release_claim(resource, owner)

    def force_release_slot(self, resource: str, token: str) -> bool:
        """See ``OperatorStore.force_release_slot``."""
        slots, holders, _ = self._lock_keys(resource)
        return bool(self._link.run("drop_slot", (slots, holders, self._locks), (resource, token)))

    def sweep(self) -> int:
        """See ``OperatorStore.sweep``."""
        total = 0
        for index in (self._claims, self._locks):
            dropped = _CHUNK
            while dropped == _CHUNK:
                dropped = self._link.run("sweep", (index,), (str(_CHUNK),))
                total += dropped
        return total

    def ping(self) -> None:
        """See ``OperatorStore.ping``."""
        with suppress(NoPermissionError):  # that is an answer, too, and the store itself never sends PING
            self._link.command("PING")

    def facts(self) -> ServerFacts:
        """See ``OperatorStore.facts``."""
        server = self._info("server")
        memory = self._info("memory")
        policy = memory.get("maxmemory_policy") or self._config("maxmemory-policy")
        maximum = memory.get("maxmemory") or self._config("maxmemory")
        mode = server.get("server_mode") or server.get("redis_mode")
        valkey = server.get("valkey_version")
        wanted = ("redis_version", "server_name", "uptime_in_seconds", "run_id")
        return ServerFacts(
            kind="valkey" if valkey else "redis",
            version=valkey or server.get("redis_version"),
            maxmemory_policy=policy,
            maxmemory=int(maximum) if maximum else None,
            cluster=mode == "cluster" if mode else None,
            extra={name: server[name] for name in wanted if name in server},
        )

    # ------------------------------------------------------------------------------ inside

    def _pages(self, index: str, limit: int, after: str | None) -> Iterator[Sequence[str]]:
        size = min(limit, _CHUNK)
        while size > 0:
            page = [text(name) for name in self._link.run("index_page", (index,), (after or "", str(size)))]
            if page:
                yield page
            if len(page) < size:
                return
            after = page[-1]

    def _read_claims(self, resources: Sequence[str]) -> list[ClaimInfo]:
        rows = self._link.run("show_claims", [redis_key(self._prefix, resource, "claim") for resource in resources], ())
        return [_claim_info(resource, row) for resource, row in zip(resources, rows, strict=True) if row]

    def _read_locks(self, resources: Sequence[str]) -> list[LockInfo]:
        rows = self._link.run("show_locks", [key for resource in resources for key in self._lock_keys(resource)], ())
        return [_lock_info(resource, row) for resource, row in zip(resources, rows, strict=True)]

    def _info(self, section: str) -> dict[str, str]:
        reply = self._allowed("INFO", section)
        lines = text(reply).splitlines() if reply else ()
        return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}

    def _config(self, name: str) -> str | None:
        reply = self._allowed("CONFIG", "GET", name)
        return text(reply[1]) if reply else None

    def _allowed(self, *command: str) -> Any:
        """Return the answer, or None where the server forbids or does not know the command (hosted servers hide some)."""
        try:
            return self._link.command(*command)
        except NoPermissionError:
            return None
        except StoreUnavailable as exc:
            if "unknown command" in exc.message:
                return None
            raise


def _claim_info(resource: str, row: Sequence[Any]) -> ClaimInfo:
    owner, task_id, state, since, expires = row
    return ClaimInfo(resource, text(owner), text(task_id), CLAIM_STATES[state], since / 1000, expires / 1000)


def _lock_info(resource: str, row: Sequence[Any]) -> LockInfo:
    fence, *values = row
    holders = tuple(_holder(values[at : at + _HOLDER_FIELDS]) for at in range(0, len(values), _HOLDER_FIELDS))
    return LockInfo(resource, holders, int(fence) if fence else None)


def _holder(values: Sequence[Any]) -> Holder:
    token, expires, task_id, worker, since, fence = values
    return Holder(text(token), text(task_id), text(worker), since / 1000, expires / 1000, fence)
