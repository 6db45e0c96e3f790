-- Put in front of the script that extends, after the slots.
-- A slot that lapsed, or that the server forgot, is taken again under its old fence: with one slot only when nobody
-- was granted a later number, since that run may have begun and ended in between.
local function retake_slot(slots, holders, fence_key, token, limit, expires, fence, owner, task_id, worker)
  purge(slots, holders)
  if holds(slots, token) then return true end
  if redis.call('ZCARD', slots) >= limit then return false end
  local last = redis.call('GET', fence_key)
  if limit == 1 and last and tonumber(last) ~= fence then return false end
  if not last then redis.call('SET', fence_key, string.format('%.0f', fence), 'PX', FENCE_MEMORY) end
  redis.call('ZADD', slots, expires, token)
  redis.call('HSET', holders, token, cmsgpack.pack(owner, task_id, worker, now, fence))
  return true
end
