-- Put in front of the scripts that touch run records. A record is one packed string for one owner:
-- state (1 running, 2 finished), token, generation, end of the lease (ms), starts without an end,
-- mark (1: a copy of the message was seen), lost (1: begin found no claim).
local GOING, FINISHED = 1, 2

local function read_run(key)
  local raw = redis.call('GET', key)
  if not raw then return nil end
  local state, token, generation, expires, starts, mark, lost = cmsgpack.unpack(raw)
  return {state = state, token = token, generation = generation, expires = expires, starts = starts, mark = mark, lost = lost}
end

-- ttl in ms; nil keeps the life that the record has.
local function write_run(key, ttl, run)
  local packed = cmsgpack.pack(run.state, run.token, run.generation, run.expires, run.starts, run.mark, run.lost)
  if ttl then
    redis.call('SET', key, packed, 'PX', ttl)
  else
    redis.call('SET', key, packed, 'KEEPTTL')
  end
end
