-- Take a slot away from the run that holds it; its next extension learns of it.
-- KEYS 1 slots (sorted set), 2 holders (hash), 3 index of locks (sorted set)
-- ARGV 1 resource, 2 token
-- Returns 1 when the token held a slot, else 0.
purge(KEYS[1], KEYS[2])
local dropped = redis.call('ZREM', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[2], ARGV[2])
settle(KEYS[1], KEYS[2], KEYS[3], ARGV[1])
return dropped
