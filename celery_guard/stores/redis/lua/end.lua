-- Give back what a run holds: slot and run record by token, claim by owner. Doing it again changes nothing.
-- KEYS 1 run record (string); with a claim: claim (string), index of claims (sorted set);
--   with a lock: slots (sorted set), holders (hash), index of locks (sorted set)
-- ARGV 1 owner, 2 token or '', 3 generation, 4 claimed resource or '', 5 until, 6 release|keep|requeue, 7 claim ttl (ms),
--   8 locked resource or '', 9 crashed 0/1, 10 finished ttl (ms), 11 copies expected 0/1, 12 task id
-- Returns {slot released 0/1, claim released 0/1, copy seen 0/1}.
local owner, token, action = ARGV[1], ARGV[2], ARGV[6]
local has_claim, has_lock = ARGV[4] ~= '', ARGV[8] ~= ''
local claim_key, claims, at = KEYS[2], KEYS[3], has_claim and 4 or 2
local slot_released, claim_released, copy_seen = 0, 0, 0
local run = read_run(KEYS[1])

if has_claim and action ~= 'keep' then
  local claim = read_claim(claim_key)
  -- A claim that runs under another token is a later run's, even of the same owner: a late end must not free it.
  local ours = claim and claim.owner == owner and (claim.state ~= RUNNING or claim.token == token)
  -- Nor is a free claim taken for a message that another delivery of it has run, or runs: nobody would give it back.
  local settled = run and (run.state == FINISHED or run.token ~= token)
  if action == 'requeue' and (ours or not claim and not settled) then
    local since, task_id = claim and claim.since or now, claim and claim.task_id or ARGV[12]
    write_claim(claim_key, claims, ARGV[4], tonumber(ARGV[7]), QUEUED, since, owner, '', task_id)
  elseif action == 'release' and ours then
    if ARGV[5] == 'expired' then
      write_claim(claim_key, claims, ARGV[4], nil, DONE, claim.since, owner, '', claim.task_id)
    else
      drop_claim(claim_key, claims, ARGV[4])
      claim_released = 1
    end
  end
end
if token == '' then return {0, claim_released, 0} end

if has_lock then
  local slots, holders = KEYS[at], KEYS[at + 1]
  purge(slots, holders)
  slot_released = redis.call('ZREM', slots, token)
  redis.call('HDEL', holders, token)
  settle(slots, holders, KEYS[at + 2], ARGV[8])
end

if run and run.token == token and run.state == GOING then
  copy_seen = run.mark
  if ARGV[9] == '1' then
    run.expires, run.mark = 0, 0
    write_run(KEYS[1], nil, run)
  elseif action ~= 'requeue' and (copy_seen == 1 or ARGV[11] == '1') then
    run.state, run.generation, run.mark = FINISHED, tonumber(ARGV[3]), 0
    write_run(KEYS[1], tonumber(ARGV[10]), run)
  else
    redis.call('DEL', KEYS[1])
  end
end
return {slot_released, claim_released, copy_seen}
