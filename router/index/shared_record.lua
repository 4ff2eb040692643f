-- Blocks that replicas were made to hold, or turned out not to. One call is one slice of bounded work.
--
-- KEYS[1]  "{namespace}"
-- ARGV[1]  the store's id; ARGV[2] seconds that what is written lives at the most
-- ARGV     then for each operation a head and block keys (8 bytes each), a part of a chain from a multiple of 16 on.
--          Head: kind (1), replica's number (2), its epoch (4), touch base (6; 0 asks for one), first block of the
--          part (4), blocks of the whole chain (4), the prompt's last whole block (4)
-- Returns  for each operation its touch base, or -1 where the epoch is over, and how many of its blocks were done; a
--          call that has done enough leaves the rest for the next
--
-- Residency is LRU, as the engine's: each touched block takes the next number of its replica's clock, the tail of a
-- chain the lowest. Numbers are kept in bins of 1/64 of the pool. Each bin counts the blocks whose last touch it is;
-- as long as all bins hold more than the pool, the lowest one falls below the floor, and what is stamped with it is
-- presumed evicted. Nothing is ever deleted for that: readers compare stamps with the floor.
local ns, spread = KEYS[1], unpack
local sub, find, byte, char = string.sub, string.find, string.byte, string.char
local unpack, pack, floor_ = struct.unpack, struct.pack, math.floor
local HELD, ENDED, FORGET = 1, 2, 3 -- and 4, told again: as it was
local PAGE, ONE, SIZE = 128, '>I2BBI5', 9
-- Records of one replica in a page, and paths in it, at the most.
local KEPT, PATHS = 8, 64
-- What one call does, in about a microsecond each, before it leaves the rest.
local ENOUGH = 500
local work = 0

local marks = redis.call('GET', ns .. ':f')
if not marks or sub(marks, 1, 16) ~= ARGV[1] then
  return redis.error_reply('NOSTORE the index is another one')
end
local now = tonumber(redis.call('TIME')[1])
local ttl = tonumber(ARGV[2])

-- Lua writes numbers of 15 digits and more as 1e+15.
local function exact(number)
  return string.format('%.0f', number)
end

local floors = {}
local function floor_of(slot)
  if not floors[slot] then
    floors[slot] = #marks >= 26 + slot * 10 and unpack('>I6', marks, 17 + slot * 10) or 0
  end
  return floors[slot]
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
-- 1 how many leading keys it holds, 1 from which of them on they are its own answer's, 5 stamp). Records stay packed:
-- a page of a popular prompt has one for each replica, and a write concerns one.
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
      'bin')
    state = {
      epoch = tonumber(t[1]) or 0,
      clock = tonumber(t[2]) or 0,
      total = tonumber(t[3]) or 0,
      pool = tonumber(t[4]) or 1,
      mark = tonumber(t[5]) or 0,
      since = tonumber(t[6]) or now,
      life = tonumber(t[7]) or ttl,
      bin = tonumber(t[8]) or 1,
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

-- Take a replica's records out of a page where they hold no more than `keys` do. Returns the path that `keys` belong
-- on, how many of them it holds already, and from which on those were its own answer's; `touched` gets their stamps.
local function overlay(paths, tag, floor, keys, touched)
  local into
  local longest, opened = 0, 0
  for p = 1, #paths do
    local path = paths[p]
    local common = common_keys(path.keys, keys)
    if common * 8 == #keys or common * 8 == #path.keys then
      into = p
    end
    local place, len, own, stamp = next_record(path.records, tag, 1, floor)
    while place do
      local reach = len < common and len or common
      for i = 1, reach do
        if not touched[i] or touched[i] < stamp then
          touched[i] = stamp
        end
      end
      if reach > longest or (reach == longest and opened < own) then
        longest, opened = reach, own
      end
      local from = place + 1
      if len <= common then
        without(path, place)
        from = place
      elseif own < common then
        path.records = sub(path.records, 1, place + 2) .. char(common) .. sub(path.records, place + 4)
      end
      place, len, own, stamp = next_record(path.records, tag, from, floor)
    end
  end
  return into, longest, opened
end

-- At most KEPT records a replica, and fewer where the page has many paths, but one: the latest. What only older ones
-- told is where short chains ended.
local function trim(paths, tag, floor, state)
  local seen, kept = 0, KEPT
  if #paths > PATHS then
    kept = 0
    for p = 1, #paths do
      local place = next_record(paths[p].records, tag, 1, floor)
      while place do
        kept = kept + 1
        place = next_record(paths[p].records, tag, place + 1, floor)
      end
    end
    kept = math.max(1, math.min(KEPT, kept - (#paths - PATHS)))
  end
  for p = #paths, 1, -1 do
    local path = paths[p]
    local place, len, _, stamp = next_record(path.records, tag, 1, floor)
    while place do
      seen = seen + 1
      if seen > kept then
        local shared = 0
        for q = p + 1, #paths do
          local at, reach = next_record(paths[q].records, tag, 1, floor)
          if at then
            shared = math.max(shared, math.min(common_keys(paths[q].keys, path.keys), reach))
          end
        end
        if len > shared then
          count(state, stamp, shared - len)
        end
        without(path, place)
        place, len, _, stamp = next_record(path.records, tag, place, floor)
      else
        place, len, _, stamp = next_record(path.records, tag, place + 1, floor)
      end
    end
    if #path.records == 0 then
      table.remove(paths, p)
    end
  end
end

local function put(name, slot, state, kind, keys, start, prompt_end, last, stamp, prune)
  local paths, touched = read(redis.call('GET', name), prune), {}
  local tag, floor = pack('>I2', slot), floor_of(slot)
  local into, longest, opened = overlay(paths, tag, floor, keys, touched)
  local n = #keys / 8
  for i = 1, n do
    if touched[i] then
      count(state, touched[i], -1)
    end
  end
  count(state, stamp, n)
  -- From `own` on, these blocks are one request's answer, from which nothing went on yet.
  local own = n
  if kind == HELD then
    if last and longest == n and opened < n then
      own = n - 1
    end
  else
    own = math.max(prompt_end - start, 0)
    if kind == ENDED and longest > own + 1 then
      own = longest
    elseif kind == ENDED and longest == own + 1 and opened <= own then
      own = own + 1 -- an earlier turn had ended in this very block
    end
    own = math.min(own, n)
  end
  local path
  if into then
    path = table.remove(paths, into)
    if #keys > #path.keys then
      path.keys = keys
    end
    if #path.keys == #keys then
      path.shorter = false
    end
  else
    path = { keys = keys, records = '' }
  end
  path.records = path.records .. pack(ONE, slot, n, own, stamp)
  paths[#paths + 1] = path
  if #paths > 1 then
    trim(paths, tag, floor, state)
  end
  write(name, paths, state.life)
end

-- The replica holds `keep` leading keys of this page, and none of what follows on this chain.
local function cut(name, slot, state, keys, keep)
  local text = redis.call('GET', name)
  if not text then
    return
  end
  local paths, tag, floor = read(text, false), pack('>I2', slot), floor_of(slot)
  local gone, held = {}, {}
  for p = 1, #paths do
    local path = paths[p]
    local beyond = common_keys(path.keys, keys) > keep
    local place, len, own, stamp = next_record(path.records, tag, 1, floor)
    while place do
      local from = place + 1
      for i = 1, len do
        local key = sub(path.keys, i * 8 - 7, i * 8)
        if not (beyond and i > keep) then
          held[key] = true
        elseif not gone[key] or gone[key] < stamp then
          gone[key] = stamp
        end
      end
      if beyond and len > keep then
        local rest = keep > 0 and pack(ONE, slot, keep, math.min(own, keep), stamp) or ''
        without(path, place)
        path.records = sub(path.records, 1, place - 1) .. rest .. sub(path.records, place)
        from = place + #rest
      end
      place, len, own, stamp = next_record(path.records, tag, from, floor)
    end
  end
  for key, stamp in pairs(gone) do
    if not held[key] then
      count(state, stamp, -1)
    end
  end
  if next(gone) then
    write(name, paths, state.life)
  end
end

local done = {}
for a = 3, #ARGV, 2 do
  if work >= ENOUGH then
    break
  end
  local kind, slot, epoch, base, start, total, prompt_end = unpack('>BI2I4I6I4I4I4', ARGV[a])
  local chain, state = ARGV[a + 1], state_of(slot)
  local blocks = #chain / 8
  if epoch ~= state.epoch then
    base = -1
  else
    if base == 0 then
      if kind ~= FORGET then
        state.clock = state.clock + total
      end
      base = state.clock
    end
    for at = 1, #chain, PAGE do
      if work >= ENOUGH then
        blocks = (at - 1) / 8
        break
      end
      local first = start + (at - 1) / 8
      local keys = sub(chain, at, at + PAGE - 1)
      local name = ns .. ':p:' .. sub(keys, 1, 8)
      if kind == FORGET then
        local keep = prompt_end - first
        cut(name, slot, state, keys, keep > 0 and keep or 0)
      else
        local last = first + #keys / 8 == total
        -- Dead records of other replicas are cleared away now and then.
        local prune = (first / 16 + epoch + base) % 16 == 0
        put(name, slot, state, kind, keys, first, prompt_end, last, floor_((base - first) / state.bin), prune)
      end
    end
  end
  done[#done + 1] = base
  done[#done + 1] = blocks
end

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
  while state.total > state.pool and floor <= top and steps < 64 do
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
    redis.call('SETRANGE', ns .. ':f', 16 + slot * 10, pack('>I6', floor))
    if floor > state.mark then
      -- A whole pool was turned over since the mark: what is written now will not live much longer than that took.
      state.life = math.min(ttl, 60 + 3 * (now - state.since))
      state.mark, state.since = top + 1, now
    end
  end
  redis.call('HSET', ns .. ':r:' .. slot, 'clock', exact(state.clock), 'total', state.total,
    'mark', exact(state.mark), 'since', state.since, 'life', state.life)
end
return done
