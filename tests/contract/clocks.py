"""Time for the contract suite: it passes at once, in either store.

A Redis server's clock cannot be moved, so the data is made older instead: every instant that the
store keeps, and every expiry, moves into the past. To the scripts that is the same.
"""

from __future__ import annotations

from typing import Any

import redis

_AGE = """
local by = tonumber(ARGV[1])
for _, key in ipairs(KEYS) do
  local ttl = redis.call('PTTL', key)
  if ttl >= 0 and ttl <= by then
    redis.call('DEL', key)
  else
    if key:find(':claim$') then
      local state, since, owner, token, task_id = cmsgpack.unpack(redis.call('GET', key))
      redis.call('SET', key, cmsgpack.pack(state, since - by, owner, token, task_id), 'KEEPTTL')
    elseif key:find(':run$') then
      local state, token, generation, expires, starts, mark, lost = cmsgpack.unpack(redis.call('GET', key))
      redis.call('SET', key, cmsgpack.pack(state, token, generation, expires - by, starts, mark, lost), 'KEEPTTL')
    elseif key:find(':holders$') then
      for _, token in ipairs(redis.call('HKEYS', key)) do
        local owner, task_id, worker, since, fence = cmsgpack.unpack(redis.call('HGET', key, token))
        redis.call('HSET', key, token, cmsgpack.pack(owner, task_id, worker, since - by, fence))
      end
    elseif not key:find(':fence$') then
      for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do redis.call('ZINCRBY', key, -by, member) end
    end
    if ttl >= 0 then redis.call('PEXPIRE', key, ttl - by) end
  end
end
"""


class FakeClock:
    """Clock of a memory store."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class AgedData:
    """Lets time pass for all that a Redis store has written under one prefix."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._client: Any = client
        self._prefix = prefix

    def list_keys(self) -> list[bytes]:
        return sorted(self._client.scan_iter(match=f"{self._prefix}:*", count=1000))

    def advance(self, seconds: float) -> None:
        keys = self.list_keys()
        self._client.eval(_AGE, len(keys), *keys, round(seconds * 1000))
