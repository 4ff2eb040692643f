-- A router tells which replicas it serves, and which incarnation of each it sees.
--
-- KEYS[1]  "{namespace}"
-- ARGV[1]  16 random bytes: the store's id, should there be none yet
-- ARGV     then four for each replica: name, start ("" where it is not known), pool in blocks (0: not known),
--          "1" to begin a new epoch in any case
-- Returns  the store's id, then for each replica its number and its epoch
local ns = KEYS[1]
local unpack, pack = struct.unpack, struct.pack
local USUAL_POOL = 16384

local marks = redis.call('GET', ns .. ':f')
if not marks then
  marks = ARGV[1]
  redis.call('SET', ns .. ':f', marks)
end
-- Stamps of a new replica begin with the time, in ms since 2025: should the store have lost what it knew of it, but not all its pages,
-- then those are older.
local time = redis.call('TIME')
local least = (tonumber(time[1]) - 1735689600) * 1000 + math.floor(tonumber(time[2]) / 1000)

local reply = { string.sub(marks, 1, 16) }
for a = 2, #ARGV, 4 do
  local name, start, pool, anew = ARGV[a], ARGV[a + 1], tonumber(ARGV[a + 2]), ARGV[a + 3] == '1'
  local slot = tonumber(redis.call('HGET', ns .. ':names', name))
  if not slot then
    slot = redis.call('HLEN', ns .. ':names')
    redis.call('HSET', ns .. ':names', name, slot)
  end
  local key = ns .. ':r:' .. slot
  local t = redis.call('HMGET', key, 'epoch', 'clock', 'bin', 'pool', 'start')
  local epoch, clock, bin = tonumber(t[1]) or 0, tonumber(t[2]) or 0, tonumber(t[3]) or 1
  local known, seen = tonumber(t[4]), t[5] or ''
  if pool == 0 then
    pool = known or USUAL_POOL
  end
  local grain = math.max(1, math.floor(pool / 64))
  if not known or #marks < 26 + slot * 10 then
    anew = true
  elseif start ~= '' and seen ~= '' and start ~= seen then
    anew = true
  elseif grain > bin * 4 or grain * 4 < bin then
    anew = true -- stamps would be too coarse, or too many
  end
  if start == '' then
    start = seen
  end
  if anew then
    -- The stamps of the earlier epoch, or of an earlier life of the store, fall below the floor: dead at once.
    local floor = math.max(math.floor(clock / bin) + 1, least)
    epoch = epoch + 1
    redis.call('DEL', ns .. ':b:' .. slot)
    redis.call('HSET', key, 'epoch', epoch, 'clock', string.format('%.0f', floor * grain), 'bin', grain,
      'pool', pool, 'start', start, 'total', 0, 'mark', string.format('%.0f', floor))
    redis.call('HDEL', key, 'since', 'life')
    redis.call('SETRANGE', ns .. ':f', 16 + slot * 10, pack('>I6I4', floor, epoch))
    marks = redis.call('GET', ns .. ':f')
  elseif pool ~= known or start ~= seen then
    redis.call('HSET', key, 'pool', pool, 'start', start)
  end
  reply[#reply + 1] = slot
  reply[#reply + 1] = epoch
end
return reply
