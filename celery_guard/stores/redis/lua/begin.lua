-- Ask to run one delivery: copies, crashes, claim, slot; a refusal takes nothing.
-- KEYS 1 run record (string); with a claim: claim (string), index of claims (sorted set);
--   with a lock: slots (sorted set), holders (hash), fence (string), index of locks (sorted set)
-- ARGV 1 owner, 2 token, 3 generation, 4 task id, 5 worker, 6 lease (ms), 7 most crashes (-1: not counted), 8 crash memory (ms),
--   9 claimed resource or '', 10 until, 11 claim ttl (ms), 12 contender 0/1, 13 locked resource or '', 14 limit
-- Returns {outcome, fence, claim lost 0/1, crashes, retry in (ms, -1 unknown), holder's task id, state of the claim in the way, time (ms) when busy}.
local RUN, DUPLICATE, BUSY, COPY_RUNNING, COPY_FINISHED, PREDECESSOR, STALE, POISON = 0, 1, 2, 3, 4, 5, 6, 7
local owner, token, generation, task_id = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local lease, most, claim_ttl = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[11])
local has_claim, has_lock = ARGV[9] ~= '', ARGV[13] ~= ''
local claim_key, claims, at = KEYS[2], KEYS[3], has_claim and 4 or 2
local slots, holders, fence_key, locks = KEYS[at], KEYS[at + 1], KEYS[at + 2], KEYS[at + 3]
local counted, starts, fence, lost = most >= 0, 0, 0, 0

local run = read_run(KEYS[1])
if run and run.state == FINISHED then
  if run.generation >= generation then return {COPY_FINISHED} end
elseif run and run.token == token then
  -- Asked again because the answer was lost: the same grant, and not one more start.
  if run.expires > now and (not has_lock or holds(slots, token)) then
    return {RUN, has_lock and holder_of(holders, token) or 0, run.lost, counted and run.starts - 1 or 0}
  end
  starts = counted and run.starts - 1 or 0
elseif run and run.expires > now then
  local left = run.expires - now
  if run.generation > generation then return {STALE, 0, 0, 0, left} end
  if run.generation < generation then return {PREDECESSOR, 0, 0, 0, left} end
  run.mark = 1
  write_run(KEYS[1], nil, run)
  return {COPY_RUNNING, 0, 0, 0, left}
elseif run then
  starts = counted and run.starts or 0 -- it lapsed: that run died, whatever its generation, and work is never dropped
end
if counted and starts >= most then return {POISON, 0, 0, starts} end

local claim = has_claim and read_claim(claim_key) or nil
local others = claim and claim.owner ~= owner
if others and ARGV[12] == '1' then return {DUPLICATE, 0, 0, starts, redis.call('PTTL', claim_key), claim.task_id, claim.state} end
if others or (has_claim and not claim and ARGV[12] ~= '1') then lost = 1 end

if has_lock then
  fence = take_slot(slots, holders, fence_key, token, tonumber(ARGV[14]), now + lease, owner, task_id, ARGV[5])
  if not fence then
    if has_claim and not others then write_claim(claim_key, claims, ARGV[9], claim_ttl, QUEUED, claim and claim.since or now, owner, '', task_id) end
    local first = redis.call('ZRANGE', slots, 0, 0, 'WITHSCORES')
    local _, in_the_way = holder_of(holders, first[1])
    return {BUSY, 0, lost, starts, first[2] - now, in_the_way, 0, now}
  end
  settle(slots, holders, locks, ARGV[13])
end
local memory = counted and math.max(lease, tonumber(ARGV[8])) or lease
write_run(KEYS[1], memory, {state = GOING, token = token, generation = generation, expires = now + lease,
  starts = counted and starts + 1 or 0, mark = 0, lost = lost})
if has_claim and not others then start_claim(claim_key, claims, ARGV[9], ARGV[10], claim, lease, claim_ttl, owner, token, task_id) end
return {RUN, fence, lost, starts}
