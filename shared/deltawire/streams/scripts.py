"""The transactions on Redis, as Lua. Each is atomic, and harmless when it runs a second time.

Written for Redis 6.2, 7 and Valkey 8. A command that Redis may refuse for want of memory stands
before the first that changes anything, so that a refused script has changed nothing. All keys of a
run share one slot of a Redis Cluster.
"""

ISSUE = """
-- KEYS: tickets, issued. ARGV: schema, then (ticket id, body) pairs.
local issued = 0
for i = 2, #ARGV, 2 do
  if redis.call('SADD', KEYS[2], ARGV[i]) == 1 then
    redis.call('XADD', KEYS[1], '*', 'schema', ARGV[1], 'id', ARGV[i], 'body', ARGV[i + 1])
    issued = issued + 1
  end
end
return issued
"""
"""Append tickets whose id was never issued."""

_BURY = """
local function bury(stream, group, dead, counters, entry_id, reason, counted_as, keep)
  local entry = redis.call('XRANGE', stream, entry_id, entry_id)[1]
  if entry then
    local fields = entry[2]
    fields[#fields + 1] = 'reason'
    fields[#fields + 1] = reason
    redis.call('XADD', dead, 'MAXLEN', '~', keep, '*', unpack(fields))
    redis.call('HINCRBY', counters, 'dead', 1)
    redis.call('HINCRBY', counters, 'dead:' .. counted_as, 1)
  end
  redis.call('XACK', stream, group, entry_id)
  redis.call('XDEL', stream, entry_id)
end
"""

CLAIM = (
    _BURY
    + """
-- KEYS: tickets, dead, counters.
-- ARGV: group, consumer, lease ms, max deliveries, reason of death, dead letters kept.
local idle = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', 64)
for _, pending in ipairs(idle) do
  local entry_id, deliveries = pending[1], pending[4]
  local entry = redis.call('XRANGE', KEYS[1], entry_id, entry_id)[1]
  if not entry then
    redis.call('XACK', KEYS[1], ARGV[1], entry_id)
  elseif deliveries >= tonumber(ARGV[4]) then
    bury(KEYS[1], ARGV[1], KEYS[2], KEYS[3], entry_id, ARGV[5], ARGV[5], ARGV[6])
  else
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry_id,
               'RETRYCOUNT', deliveries + 1, 'JUSTID')
    return {entry_id, deliveries + 1, entry[2]}
  end
end
local fresh = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1,
                         'STREAMS', KEYS[1], '>')
if not fresh then return false end
return {fresh[1][2][1][1], 1, fresh[1][2][1][2]}
"""
)
"""Claim a ticket whose lease ran out, burying those delivered too often on the way, or else a fresh
one. Does not wait."""

HEARTBEAT = """
-- KEYS: tickets. ARGV: group, consumer, entry id. Returns 1, or 0 when the lease is lost.
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not pending or pending[2] ~= ARGV[2] then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'JUSTID')
return 1
"""
"""Set the idle time of a lease back to zero."""

GIVE_BACK = """
-- KEYS: tickets. ARGV: group, consumer, entry id, idle ms. Returns 1, or 0 when the lease is lost.
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not pending or pending[2] ~= ARGV[2] then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], 'returned', 0, ARGV[3],
           'IDLE', ARGV[4], 'RETRYCOUNT', pending[4] - 1, 'JUSTID')
return 1
"""
"""Make a lease look long abandoned, and not count this delivery: the next claim takes it."""

FINISH = """
-- KEYS: tickets, groups, finished, counters.
-- ARGV: group, entry id, ticket id, idempotency key, schema, body.
-- Returns 1: appended (by this call or by an earlier try of it). 0: another group of this id was
-- there before. -1: the ticket is not open any more.
local known = redis.call('HGET', KEYS[3], ARGV[3])
if known == ARGV[4] then return 1 end
if not known then
  if not redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)[1] then return -1 end
  redis.call('XADD', KEYS[2], '*', 'schema', ARGV[5], 'id', ARGV[3], 'body', ARGV[6])
  redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
else
  redis.call('HINCRBY', KEYS[4], 'doubled', 1)
end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
return known and 0 or 1
"""
"""Append the group and ack its ticket."""

_NOW_MS = """
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
"""

ACK = (
    _NOW_MS
    + """
-- KEYS: groups, issued, finished, settled.
-- ARGV: group, ms for which ids are remembered, then (entry id, group id) pairs.
for i = 3, #ARGV, 2 do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
  if ARGV[i + 1] ~= '' then
    redis.call('ZADD', KEYS[4], now_ms, ARGV[i + 1])
  end
end
local old = redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now_ms - ARGV[2], 'LIMIT', 0, 1000)
if #old > 0 then
  redis.call('SREM', KEYS[2], unpack(old))
  redis.call('HDEL', KEYS[3], unpack(old))
  redis.call('ZREM', KEYS[4], unpack(old))
end
return (#ARGV - 2) / 2
"""
)
"""Ack groups and free them. Their ids are known for a while longer, to whoever repeats a call whose
answer was lost. Nothing else trims a stream."""

BURY = (
    _BURY
    + """
-- KEYS: stream, dead, counters. ARGV: group, entry id, reason, counted as, dead letters kept.
bury(KEYS[1], ARGV[1], KEYS[2], KEYS[3], ARGV[2], ARGV[3], ARGV[4], ARGV[5])
return 1
"""
)
"""Move an entry to the dead letters with its reason."""

DEAD_LETTERS = """
-- KEYS: dead. ARGV: the entry before the first, how many. Returns entry id, id, reason of each.
local found = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2])) do
  local told = {id = '', reason = ''}
  for i = 1, #entry[2], 2 do told[entry[2][i]] = entry[2][i + 1] end
  found[#found + 1] = {entry[1], told.id, told.reason}
end
return found
"""
"""Dead letters without their bodies."""

CANCEL_OPEN = """
-- KEYS: tickets, withdrawn. ARGV: group. Returns the ids of all tickets ever withdrawn.
local open = redis.call('XRANGE', KEYS[1], '-', '+')
for _, entry in ipairs(open) do
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'id' then redis.call('SADD', KEYS[2], entry[2][i + 1]) end
  end
end
for _, entry in ipairs(open) do
  redis.call('XACK', KEYS[1], ARGV[1], entry[1])
  redis.call('XDEL', KEYS[1], entry[1])
end
return redis.call('SMEMBERS', KEYS[2])
"""
"""Withdraw every open ticket, leased or not. Ids are kept, for a trainer that did not hear them."""

DEPTH = """
-- KEYS: tickets, groups, counters. ARGV: the trainer's group.
return {redis.call('XLEN', KEYS[1]), redis.call('XLEN', KEYS[2]),
        redis.call('XPENDING', KEYS[2], ARGV[1])[1], redis.call('HGETALL', KEYS[3])}
"""
"""Open tickets, groups, groups delivered and not acked, counters."""

REGISTER = (
    _NOW_MS
    + """
-- KEYS: replica, index. ARGV: replica id, status, time to live in ms.
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], now_ms + ARGV[3], ARGV[1])
return 1
"""
)
"""Heartbeat of a replica, by the clock of Redis."""

LIVE_REPLICAS = (
    _NOW_MS
    + """
-- KEYS: index. Returns replica ids.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""
)
"""Replicas whose heartbeat has not run out."""
