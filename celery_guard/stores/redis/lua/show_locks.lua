-- Read locks for people; who lapsed is not shown.
-- KEYS for each lock: slots (sorted set), holders (hash), fence (string)
-- Returns for each {fence or '', token, expires (ms), task id, worker, since (ms), fence, token, ...}.
local shown = {}
for k = 1, #KEYS, 3 do
  local lock = {redis.call('GET', KEYS[k + 2]) or ''}
  local live = redis.call('ZRANGEBYSCORE', KEYS[k], '(' .. string.format('%.0f', now), '+inf', 'WITHSCORES')
  for i = 1, #live, 2 do
    local raw = redis.call('HGET', KEYS[k + 1], live[i])
    if raw then
      local _, task_id, worker, since, fence = cmsgpack.unpack(raw)
      for _, value in ipairs({live[i], tonumber(live[i + 1]), task_id, worker, since, fence}) do lock[#lock + 1] = value end
    end
  end
  shown[#shown + 1] = lock
end
return shown
