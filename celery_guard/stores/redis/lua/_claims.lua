-- Put in front of the scripts that touch claims. A claim is one packed string, since a million of them may wait:
-- state (1 queued, 2 running, 3 done), since (ms), owner, token of the run ('' unless running), task id.
local QUEUED, RUNNING, DONE = 1, 2, 3

local function read_claim(key)
  local raw = redis.call('GET', key)
  if not raw then return nil end
  local state, since, owner, token, task_id = cmsgpack.unpack(raw)
  return {state = state, since = since, owner = owner, token = token, task_id = task_id}
end

-- ttl in ms; nil keeps the life that the claim has.
local function write_claim(key, index, resource, ttl, state, since, owner, token, task_id)
  local packed = cmsgpack.pack(state, since, owner, token, task_id)
  if ttl then
    redis.call('SET', key, packed, 'PX', ttl)
    redis.call('ZADD', index, now + ttl, resource)
  else
    redis.call('SET', key, packed, 'KEEPTTL')
  end
end

local function drop_claim(key, index, resource)
  redis.call('DEL', key)
  redis.call('ZREM', index, resource)
end

-- What becomes of a claim that is free or the owner's own when its run starts.
local function start_claim(key, index, resource, until_, claim, lease, ttl, owner, token, task_id)
  local since = claim and claim.since or now
  if until_ == 'executing' then
    drop_claim(key, index, resource) -- one that expired has an entry in the index still
  elseif until_ == 'expired' then
    write_claim(key, index, resource, not claim and ttl or nil, RUNNING, since, owner, token, task_id)
  else
    write_claim(key, index, resource, lease, RUNNING, since, owner, token, task_id)
  end
end
