-- Read claims for people.
-- KEYS claims (strings)
-- Returns for each {owner, task id, state, since (ms), expires (ms)}, or 0 where there is none.
local shown = {}
for i, key in ipairs(KEYS) do
  local claim = read_claim(key)
  shown[i] = claim and {claim.owner, claim.task_id, claim.state, claim.since, now + redis.call('PTTL', key)} or 0
end
return shown
