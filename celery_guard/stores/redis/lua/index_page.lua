-- One page of an index, in order of expiry, without what has expired.
-- KEYS 1 index (sorted set resource -> expiry in ms)
-- ARGV 1 resource that ended the page before or '', 2 most entries
-- Returns the resources.
local start = redis.call('ZCOUNT', KEYS[1], '-inf', now)
if ARGV[1] ~= '' then
  local rank = redis.call('ZRANK', KEYS[1], ARGV[1])
  if rank and rank >= start then start = rank + 1 end
end
return redis.call('ZRANGE', KEYS[1], start, start + ARGV[2] - 1)
