-- Put in front of the scripts that touch slots: a sorted set token -> end of its lease (ms), and beside it
-- a hash token -> packed (owner, task id, worker, since in ms, fence).

local FENCE_MEMORY = 86400000

local function purge(slots, holders)
  local lapsed = redis.call('ZRANGEBYSCORE', slots, '-inf', now)
  for _, token in ipairs(lapsed) do redis.call('HDEL', holders, token) end
  if #lapsed > 0 then redis.call('ZREMRANGEBYSCORE', slots, '-inf', now) end
end

local function holds(slots, token)
  local ends = redis.call('ZSCORE', slots, token)
  return ends and tonumber(ends) > now
end

-- Returns fence and task id of a holder.
local function holder_of(holders, token)
  local raw = redis.call('HGET', holders, token)
  if not raw then return 0, '' end
  local _, task_id, _, _, fence = cmsgpack.unpack(raw)
  return fence, task_id
end

-- Both keys live as long as the longest lease in them, and so does the entry in the index.
local function settle(slots, holders, index, resource)
  local last = redis.call('ZRANGE', slots, -1, -1, 'WITHSCORES')
  if last[2] then
    redis.call('PEXPIREAT', slots, last[2])
    redis.call('PEXPIREAT', holders, last[2])
    redis.call('ZADD', index, last[2], resource)
  else
    redis.call('ZREM', index, resource)
  end
end

-- Returns the fence of the slot, or nil when all are taken. The number follows the server's clock, so that it
-- grows even over a loss of the data; %.0f, because Lua's own conversion keeps 14 digits only.
local function take_slot(slots, holders, fence_key, token, limit, expires, owner, task_id, worker)
  purge(slots, holders)
  if holds(slots, token) then
    redis.call('ZADD', slots, expires, token)
    return (holder_of(holders, token))
  end
  if redis.call('ZCARD', slots) >= limit then return nil end
  local fence = math.max(tonumber(redis.call('GET', fence_key) or 0) + 1, now_us)
  redis.call('SET', fence_key, string.format('%.0f', fence), 'PX', FENCE_MEMORY)
  redis.call('ZADD', slots, expires, token)
  redis.call('HSET', holders, token, cmsgpack.pack(owner, task_id, worker, now, fence))
  return fence
end
