-- What scripts that write pages have in common; put before each of them.
--
-- KEYS[1]  "{namespace}:LAYOUT"
-- ARGV[1]  the store's id; ARGV[2] seconds that what is written lives at the most
local ns, spread = KEYS[1], unpack
local sub, find, byte, char = string.sub, string.find, string.byte, string.char
local unpack, pack, floor_ = struct.unpack, struct.pack, math.floor
local PAGE, ONE, SIZE = 128, '<I2>BBI5I2', 11
-- A replica's marks: its floor (6), its epoch (4), until when its contents are told by a writer (6: ms, twice; plus one
-- where they are whole).
local MARKS = 16
-- What one call does, in about a microsecond each, before it leaves the rest.
local ENOUGH = 500
local work = 0

local marks = redis.call('GET', ns .. ':f')
if not marks or sub(marks, 1, 16) ~= ARGV[1] then
  return redis.error_reply('NOSTORE the index is another one')
end
local time = redis.call('TIME')
local now = tonumber(time[1])
-- Milliseconds since 2025.
local now_ms = (now - 1735689600) * 1000 + floor_(tonumber(time[2]) / 1000)
local ttl = tonumber(ARGV[2])

-- Lua writes numbers of 15 digits and more as 1e+15.
local function exact(number)
  return string.format('%.0f', number)
end

local floors = {}
local function floor_of(slot)
  if not floors[slot] then
    floors[slot] = #marks >= 32 + slot * MARKS and unpack('>I6', marks, 17 + slot * MARKS) or 0
  end
  return floors[slot]
end

-- Whether a writer tells what a replica holds, as its events say.
local function is_told(slot)
  return #marks >= 32 + slot * MARKS and floor_(unpack('>I6', marks, 27 + slot * MARKS) / 2) > now_ms
end

local function common_keys(one, other)
  local most = #one < #other and #one or #other
  if sub(one, 1, most) == sub(other, 1, most) then
    return most / 8
  end
  local at = 0
  while at < most and sub(one, at + 1, at + 8) == sub(other, at + 1, at + 8) do
    at = at + 8
  end
  return at / 8
end

-- A page is a list of paths, least recently written first; a path is 1 to 16 keys and its records (2 bytes replica,
-- 1 how many leading keys it holds, 1 from which of them on they are its own answer's, 5 stamp, 2 the number of the page
-- in which the chain ended that was written last, 0 where that is not known). Records stay packed: a page of a popular
-- prompt has one for each replica, and a write concerns one.
local function read(text, prune)
  local paths, at, size = {}, 1, text and #text or 0
  while at < size do
    local keys, records
    keys, records, at = unpack('>BI2', text, at)
    local path = { keys = sub(text, at, at + keys * 8 - 1) }
    at = at + keys * 8
    local stop = at + records * SIZE
    if prune then
      local kept = {}
      for place = at, stop - 1, SIZE do
        local slot, _, _, stamp = unpack(ONE, text, place)
        if stamp >= floor_of(slot) then
          kept[#kept + 1] = sub(text, place, place + SIZE - 1)
        end
      end
      path.records, path.shorter = table.concat(kept), true
    else
      path.records = sub(text, at, stop - 1)
    end
    at = stop
    paths[#paths + 1] = path
    work = work + 3 + records / (prune and 2 or 16)
  end
  work = work + 3
  return paths
end

-- The name of the mark that a turn ended in a block of a page, the `nth` of `keys`.
local function turn(keys, nth)
  return ns .. ':e:' .. sub(keys, 1, 8) .. sub(keys, nth * 8 - 1, nth * 8)
end

-- The next record of a replica, from `from` on: its place, length, own part and stamp. Dead ones count as none.
local function next_record(records, tag, from, floor)
  local place = find(records, tag, from, true)
  while place do
    if place % SIZE == 1 then
      local len, own, stamp = unpack('>BBI5', records, place + 2)
      if stamp >= floor then
        return place, len, own, stamp
      end
    end
    place = find(records, tag, place + 1, true)
  end
  return nil
end

local function without(path, place)
  path.records = sub(path.records, 1, place - 1) .. sub(path.records, place + SIZE)
  path.shorter = true
end

local function write(name, paths, life)
  local out = {}
  for p = 1, #paths do
    local path = paths[p]
    local records, keys = path.records, #path.keys / 8
    if path.shorter then
      -- Keys that nobody holds any more need not be kept.
      local longest = 0
      for place = 3, #records, SIZE do
        local len = byte(records, place)
        if len > longest then
          longest = len
        end
      end
      keys = longest
    end
    if #records > 0 and keys > 0 then
      out[#out + 1] = pack('>BI2', keys, #records / SIZE)
      out[#out + 1] = sub(path.keys, 1, keys * 8)
      out[#out + 1] = records
    end
  end
  if #out == 0 then
    redis.call('DEL', name)
  else
    redis.call('SET', name, table.concat(out), 'EX', life)
  end
end

local states = {}
local function state_of(slot)
  local state = states[slot]
  if not state then
    local t = redis.call('HMGET', ns .. ':r:' .. slot, 'epoch', 'clock', 'total', 'pool', 'mark', 'since', 'life',
      'bin', 'pass')
    state = {
      epoch = tonumber(t[1]) or 0,
      clock = tonumber(t[2]) or 0,
      total = tonumber(t[3]) or 0,
      pool = tonumber(t[4]) or 1,
      mark = tonumber(t[5]) or 0,
      since = tonumber(t[6]) or now,
      life = tonumber(t[7]) or ttl,
      bin = tonumber(t[8]) or 1,
      pass = tonumber(t[9]) or 0,
      bins = {},
    }
    states[slot] = state
  end
  return state
end

local function count(state, stamp, blocks)
  state.bins[stamp] = (state.bins[stamp] or 0) + blocks
  state.total = state.total + blocks
end

-- What was counted, written back; and, where a replica holds more than its pool by now, its floor is raised.
local function settle()
  for slot, state in pairs(states) do
    local key = ns .. ':b:' .. slot
    local from = floor_of(slot)
    for stamp, blocks in pairs(state.bins) do
      if blocks ~= 0 and stamp >= from then
        if redis.call('HINCRBY', key, exact(stamp), blocks) <= 0 then
          redis.call('HDEL', key, exact(stamp))
        end
      end
    end
    local floor, top, steps = from, floor_(state.clock / state.bin), 0
    while not is_told(slot) and state.total > state.pool and floor <= top and steps < 64 do
      local names = {}
      for i = 0, 15 do
        names[i + 1] = exact(floor + i)
      end
      local counts = redis.call('HMGET', key, spread(names))
      for i = 1, 16 do
        if state.total > state.pool and floor <= top then
          if counts[i] then
            state.total = state.total - tonumber(counts[i])
            redis.call('HDEL', key, exact(floor))
          end
          floor = floor + 1
        end
      end
      steps = steps + 1
    end
    if floor > from then
      redis.call('SETRANGE', ns .. ':f', 16 + slot * MARKS, pack('>I6', floor))
      if floor > state.mark then
        -- A whole pool was turned over since the mark: what is written now will not live much longer than that took.
        state.life = math.min(ttl, 60 + 3 * (now - state.since))
        state.mark, state.since = top + 1, now
      end
    end
    redis.call('HSET', ns .. ':r:' .. slot, 'clock', exact(state.clock), 'total', state.total,
      'mark', exact(state.mark), 'since', state.since, 'life', state.life)
  end
end

-- Prompts on their way to a replica whose contents are told: pages of their own, in which each entry is the keys of a
-- path (1 byte how many), the replica (2), the low byte of its epoch (1), the page from which on the run it belongs to
-- goes without a gap (2), until when it counts, in ms since 2025 (5).
local SOON, ENTRIES = '>I2BI2I5', 64

-- The entries of a page that are not over; `change` gives an entry's keys as they are to be from now on, nil for none.
local function soon_of(text, change)
  local out, last, at = {}, 0, 1
  while text and at < #text do
    local keys = sub(text, at + 1, at + byte(text, at) * 8)
    local tail = at + 1 + #keys
    local slot, epoch, first, till = unpack(SOON, text, tail)
    if till > now_ms then
      keys = change(keys, slot, epoch, first, till)
      if keys then
        out[#out + 1] = char(#keys / 8) .. keys .. sub(text, tail, tail + 9)
        last = math.max(last, till)
      end
    end
    at = tail + 10
  end
  work = work + 2 + #out / 2
  return out, last
end

-- Of a page's entries of one replica so many leading blocks are kept as `kept` says of their keys.
local function cut_soon(name, slot, kept)
  local text = redis.call('GET', name)
  if not text then
    return
  end
  local out, last = soon_of(text, function(path, who)
    local keep = who == slot and kept(path) or #path / 8
    return keep > 0 and sub(path, 1, keep * 8) or nil
  end)
  if #out == 0 then
    redis.call('DEL', name)
  else
    redis.call('SET', name, table.concat(out), 'PX', exact(last - now_ms))
  end
end

