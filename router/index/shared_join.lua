-- A router tells which replicas it serves, and which incarnation of each it sees.
--
-- KEYS[1]  "{namespace}:LAYOUT"
-- ARGV[1]  16 random bytes: the store's id, should there be none yet
-- ARGV     then five for each replica: name; start ("" where it is not known); the time of its process's first KV events
--          ("" where these are not known; by the same clock as start); pool in blocks (0: not known); "1" where
--          another process is known by other means, "2" where the same one holds nothing any more
-- Returns  the store's id, then for each replica its number, its epoch and its data-parallel ranks: number (2) and epoch
--          (4) of each of those that have a number, from 0 on. Who tells of the process before this one has not noticed
--          its end yet and gets 0 for an epoch
--
-- A process is known by its start time, or by that of its first events, whichever a router sees first.
local ns = KEYS[1]
local unpack, pack = struct.unpack, struct.pack
local USUAL_POOL, MARKS = 16384, 16

local marks = redis.call('GET', ns .. ':f')
if not marks then
  marks = ARGV[1]
  redis.call('SET', ns .. ':f', marks)
end
-- Stamps of a new replica begin with the time, in ms since 2025: should the store have lost what it knew of it, but not
-- all its pages, then those are older.
local time = redis.call('TIME')
local least = (tonumber(time[1]) - 1735689600) * 1000 + math.floor(tonumber(time[2]) / 1000)

local reply = { string.sub(marks, 1, 16) }
for a = 2, #ARGV, 5 do
  local name, start, heard, pool, anew = ARGV[a], ARGV[a + 1], ARGV[a + 2], tonumber(ARGV[a + 3]), ARGV[a + 4]
  local slot = tonumber(redis.call('HGET', ns .. ':names', name))
  if not slot then
    slot = redis.call('HLEN', ns .. ':names')
    redis.call('HSET', ns .. ':names', name, slot)
  end
  local key = ns .. ':r:' .. slot
  local t = redis.call('HMGET', key, 'epoch', 'clock', 'bin', 'pool', 'start', 'heard', 'was', 'washeard')
  local epoch, clock, bin = tonumber(t[1]) or 0, tonumber(t[2]) or 0, tonumber(t[3]) or 1
  local known, seen, first, was, washeard = tonumber(t[4]), t[5] or '', t[6] or '', t[7] or '', t[8] or ''
  local behind = (start ~= '' and start == was and (heard == '' or heard == washeard))
    or (start == '' and heard ~= '' and heard == washeard)
  if start == was then
    start = ''
  end
  if heard == washeard then
    heard = ''
  end
  if pool == 0 then
    pool = known or USUAL_POOL
  end
  local grain = math.max(1, math.floor(pool / 64))
  local later = heard ~= '' and first ~= '' and tonumber(heard) > tonumber(first)
  if not known or #marks < 32 + slot * MARKS then
    anew = '3'
  elseif behind then
    anew = ''
  elseif start ~= '' and seen ~= '' and start ~= seen then
    anew = '1'
  elseif later and not (seen ~= '' and tonumber(seen) > tonumber(first)) then
    anew = '1' -- events of a later process, of which no start time had told
  elseif anew == '' and (grain > bin * 4 or grain * 4 < bin) then
    anew = '2' -- stamps would be too coarse, or too many
  end
  if anew == '1' then
    -- What was known is the earlier one's, and what is told too, if it is the same.
    start, heard = start ~= seen and start or '', heard ~= first and heard or ''
    was, washeard = seen ~= '' and seen or was, first ~= '' and first or washeard
  else
    start = start ~= '' and start or seen
    heard = (first == '' or later) and heard or first
  end
  if anew ~= '' then
    -- The stamps of the earlier epoch, or of an earlier life of the store, fall below the floor: dead at once.
    local floor = math.max(math.floor(clock / bin) + 1, least)
    epoch = epoch + 1
    redis.call('DEL', ns .. ':b:' .. slot)
    redis.call('HSET', key, 'epoch', epoch, 'clock', string.format('%.0f', floor * grain), 'bin', grain,
      'pool', pool, 'start', start, 'heard', heard, 'was', was, 'washeard', washeard, 'total', 0,
      'mark', string.format('%.0f', floor))
    redis.call('HDEL', key, 'since', 'life', 'pass')
    redis.call('SETRANGE', ns .. ':f', 16 + slot * MARKS, pack('>I6I4I6', floor, epoch, 0))
    marks = redis.call('GET', ns .. ':f')
  elseif not behind and (pool ~= known or start ~= seen or heard ~= first) then
    redis.call('HSET', key, 'pool', pool, 'start', start, 'heard', heard)
  end
  reply[#reply + 1] = slot
  reply[#reply + 1] = behind and 0 or epoch
  local ranks, rank = {}, 0
  while true do
    local number = tonumber(redis.call('HGET', ns .. ':names', name .. '/' .. rank))
    if not number then
      break
    end
    local of = tonumber(redis.call('HGET', ns .. ':r:' .. number, 'epoch')) or 0
    ranks[#ranks + 1] = pack('>I2I4', number, of)
    rank = rank + 1
  end
  reply[#reply + 1] = table.concat(ranks)
end
return reply
