-- Drop entries of what has expired from an index, a bounded number at a time.
-- KEYS 1 index (sorted set resource -> expiry in ms)
-- ARGV 1 most entries
-- Returns how many were dropped.
local gone = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
if #gone > 0 then redis.call('ZREM', KEYS[1], unpack(gone)) end
return #gone
