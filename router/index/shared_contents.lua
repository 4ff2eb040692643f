-- What a replica holds, as its events say: told by the one router that is its writer.
--
-- ARGV     after the store's id and the seconds: [3] the router's id; [4] its lease in ms; [5] the replica's number (2)
--          and its epoch (4); then for each operation a head and a body. Head: kind (1) and, of a page, what is to be
--          said of it (1: 1 all pages are told again; 2 blocks went; 4 there are more paths). Body of a page: the first
--          of its keys (8), then for each path how many keys (1) and these (8 each); none: nothing of it is held
-- Returns  how many operations were done, the rest being left for the next call; -1 where the epoch is over, -2 where
--          another router is the writer
--
-- A page is told as a whole: what was said of the replica before goes. To begin with, and now and then, all pages are
-- told again (BEGIN ... WHOLE): what was not, because it was presumed, or told by a writer that is gone, or its removal
-- was lost, falls below the floor with WHOLE.
local BEGIN, TOLD, WHOLE = 1, 2, 3
local AGAIN, REMOVED, MORE = 1, 2, 4
-- Paths in a page at the most, of all replicas.
local PATHS = 64
local me, lease = ARGV[3], tonumber(ARGV[4])
local slot, epoch = unpack('>I2I4', ARGV[5])
local state, tag = state_of(slot), pack('<I2', slot)

if epoch ~= state.epoch then
  return -1
end
if redis.call('GET', ns .. ':writer:' .. slot) ~= me then
  return -2
end

local function set_told(whole)
  local value = (now_ms + lease) * 2 + (whole and 1 or 0)
  redis.call('SETRANGE', ns .. ':f', 26 + slot * MARKS, pack('>I6', value))
end

local function has(flags, which)
  return math.floor(flags / which) % 2 == 1
end

local function tell(body, flags)
  local name = ns .. ':p:' .. sub(body, 1, 8)
  local text = redis.call('GET', name)
  local paths, floor = read(text, has(flags, AGAIN)), floor_of(slot)
  local before, lost = {}, {} -- key -> stamp; paths of which something may have gone
  for p = 1, #paths do
    local path = paths[p]
    local place, len, _, stamp = next_record(path.records, tag, 1, floor)
    while place do
      for i = 1, len do
        local key = sub(path.keys, i * 8 - 7, i * 8)
        if not before[key] or before[key] < stamp then
          before[key] = stamp
        end
      end
      without(path, place)
      place, len, _, stamp = next_record(path.records, tag, place, floor)
    end
  end

  local held, fresh, all, told, at = {}, 0, 0, {}, 9
  local others = 0
  for p = 1, #paths do
    others = others + (#paths[p].records > 0 and 1 or 0)
  end
  local most = math.max(1, PATHS - others)
  while at < #body do
    local n = byte(body, at)
    told[#told + 1] = sub(body, at + 1, at + n * 8)
    at = at + 1 + n * 8
  end
  if #told > most then
    flags = flags + (has(flags, MORE) and 0 or MORE)
  end
  for i = math.max(1, #told - most + 1), #told do
    local keys = told[i]
    for place = 1, #keys, 8 do
      local key = sub(keys, place, place + 7)
      if not held[key] then
        held[key], all = true, all + 1
        fresh = fresh + (before[key] and 0 or 1)
      end
    end
  end
  state.clock = state.clock + (has(flags, AGAIN) and all or fresh)
  local stamp = floor_(state.clock / state.bin)
  for _, since in pairs(before) do
    count(state, since, -1)
  end
  count(state, stamp, all)

  for i = math.max(1, #told - most + 1), #told do
    local keys, into = told[i], nil
    local n = #keys / 8
    for p = 1, #paths do
      local common = common_keys(paths[p].keys, keys)
      if common == n or common * 8 == #paths[p].keys then
        into = p
        break
      end
    end
    local path = into and table.remove(paths, into) or { keys = keys, records = '' }
    if #keys > #path.keys then
      path.keys = keys
    end
    path.records = path.records .. pack(ONE, slot, n, n + (has(flags, MORE) and 128 or 0), stamp, 0)
    paths[#paths + 1] = path
    work = work + 2
  end
  if text or #told > 0 then
    write(name, paths, ttl)
  end

  if has(flags, REMOVED) then
    -- What went was there: nobody need wait for it any longer.
    cut_soon(ns .. ':s:' .. sub(body, 1, 8), slot, function(path)
      local keep = 0
      for i = 1, #told do
        keep = math.max(keep, common_keys(path, told[i]))
      end
      return keep
    end)
  end
end

local done = 0
for a = 6, #ARGV, 2 do
  if work >= ENOUGH then
    break
  end
  local kind, flags = byte(ARGV[a], 1, 2)
  if kind == BEGIN then
    -- Stamps from here on are above all that were given before.
    state.clock = (floor_(state.clock / state.bin) + 1) * state.bin
    state.pass = state.clock / state.bin
    redis.call('HSET', ns .. ':r:' .. slot, 'pass', exact(state.pass))
    local value = #marks >= 32 + slot * MARKS and unpack('>I6', marks, 27 + slot * MARKS) or 0
    set_told(is_told(slot) and value % 2 == 1)
  elseif kind == WHOLE then
    local floor = floor_of(slot)
    local bins, names = redis.call('HGETALL', ns .. ':b:' .. slot), {}
    state.total = 0
    for i = 1, #bins, 2 do
      if tonumber(bins[i]) < state.pass then
        names[#names + 1] = bins[i]
      else
        state.total = state.total + tonumber(bins[i + 1])
      end
    end
    for from = 1, #names, 512 do
      redis.call('HDEL', ns .. ':b:' .. slot, spread(names, from, math.min(from + 511, #names)))
    end
    for stamp in pairs(state.bins) do
      if stamp < state.pass then
        state.bins[stamp] = nil
      end
    end
    for _, blocks in pairs(state.bins) do
      state.total = state.total + blocks
    end
    if state.pass > floor then
      redis.call('SETRANGE', ns .. ':f', 16 + slot * MARKS, pack('>I6', state.pass))
      floors[slot] = state.pass
    end
    set_told(true)
  else
    tell(ARGV[a + 1], flags)
  end
  done = done + 1
end

settle()
return done
