-- Free the claim of an owner, or shorten its life for a dispatch whose fate is unknown.
-- KEYS 1 claim (string), 2 index of claims (sorted set)
-- ARGV 1 resource, 2 owner, 3 ttl (ms; -1: free it now)
-- Returns 1 when the owner held it, else 0.
local claim = read_claim(KEYS[1])
local ttl = tonumber(ARGV[3])
if not claim or claim.owner ~= ARGV[2] then return 0 end
if ttl < 0 then
  drop_claim(KEYS[1], KEYS[2], ARGV[1])
-- A running claim answers the question: the message arrived, and its heartbeat keeps the claim.
elseif claim.state ~= RUNNING and ttl < redis.call('PTTL', KEYS[1]) then
  redis.call('PEXPIRE', KEYS[1], ttl)
  redis.call('ZADD', KEYS[2], now + ttl, ARGV[1])
end
return 1
