-- Extend all that one process holds, in order; what lapsed is taken again where nobody came in between.
-- KEYS 1 index of claims, 2 index of locks (sorted sets); then for each run: run record (string);
--   with a claim: claim (string); with a lock: slots (sorted set), holders (hash), fence (string)
-- ARGV eleven for each run: owner, token, generation, task id, worker, lease (ms), crash memory (ms),
--   claimed resource or '', locked resource or '', limit, fence (0: none)
-- Returns for each run 0 held, 1 taken again, 2 lost; plus 10 when the claim was lost.
local answers, key = {}, 3

-- The claim goes on with its run, unless another owner has it; queued under our owner it belongs to our successor.
local function extend_claim(name, resource, lease, retake, owner, token, task_id)
  local claim = read_claim(name)
  if not claim and not retake or claim and claim.owner ~= owner then return 10 end
  if not claim or retake or (claim.state == RUNNING and claim.token == token) then
    write_claim(name, KEYS[1], resource, lease, RUNNING, claim and claim.since or now, owner, token, task_id)
  end
  return 0
end

for a = 1, #ARGV, 11 do
  local owner, token, task_id, lease = ARGV[a], ARGV[a + 1], ARGV[a + 3], tonumber(ARGV[a + 5])
  local has_claim, has_lock = ARGV[a + 7] ~= '', ARGV[a + 8] ~= ''
  local run_key, claim_key, at = KEYS[key], KEYS[key + 1], key + (has_claim and 2 or 1)
  local slots, holders, fence_key = KEYS[at], KEYS[at + 1], KEYS[at + 2]
  key = at + (has_lock and 3 or 0)
  local run = read_run(run_key)
  local live = run and run.state == GOING and run.expires > now
  local ours = run and run.token == token
  local kept = live and ours
  local ok = kept or not (live or run and run.state == FINISHED)
  if ok and has_lock then
    if kept then
      ok = holds(slots, token)
    else
      ok = retake_slot(slots, holders, fence_key, token, tonumber(ARGV[a + 9]), now + lease, tonumber(ARGV[a + 10]), owner, task_id, ARGV[a + 4])
    end
    if ok then
      redis.call('ZADD', slots, 'XX', now + lease, token)
      settle(slots, holders, KEYS[2], ARGV[a + 8])
    end
  end
  local answer = 2
  if ok then
    local memory = tonumber(ARGV[a + 6])
    write_run(run_key, math.max(lease, memory), {state = GOING, token = token, generation = tonumber(ARGV[a + 2]), expires = now + lease,
      starts = run and run.starts or (memory > 0 and 1 or 0), mark = ours and run.mark or 0, lost = ours and run.lost or 0})
    answer = kept and 0 or 1
    if has_claim then answer = answer + extend_claim(claim_key, ARGV[a + 7], lease, not kept, owner, token, task_id) end
  end
  answers[#answers + 1] = answer
end
return answers
