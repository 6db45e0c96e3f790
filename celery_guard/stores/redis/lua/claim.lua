-- Take, renew or find held the claim of a resource.
-- KEYS 1 claim (string), 2 index of claims (sorted set)
-- ARGV 1 resource, 2 owner, 3 task id, 4 ttl (ms)
-- Returns 0 taken, 1 renewed by its owner, or {task id, state, age (ms)} of the holder.
local claim = read_claim(KEYS[1])
local ttl = tonumber(ARGV[4])
if not claim then
  write_claim(KEYS[1], KEYS[2], ARGV[1], ttl, QUEUED, now, ARGV[2], '', ARGV[3])
  return 0
end
if claim.owner ~= ARGV[2] then return {claim.task_id, claim.state, now - claim.since} end
write_claim(KEYS[1], KEYS[2], ARGV[1], ttl, QUEUED, claim.since, claim.owner, '', ARGV[3])
return 1
