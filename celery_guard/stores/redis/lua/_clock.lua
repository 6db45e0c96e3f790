-- Put in front of every script that needs the time: the server's clock, never the caller's.
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)
