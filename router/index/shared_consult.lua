-- Who holds how much of these chains, and what the other routers have given to the replicas. Reads only.
--
-- KEYS[1]  "{namespace}": one hash tag, so that all keys lie in one slot of a cluster
-- ARGV[1]  the store's id, 16 bytes; ARGV[2] the asking router's id
-- ARGV     then for each chain: its replicas' numbers (2 bytes each), its block keys (8 bytes each)
-- Returns  1: for each chain and replica, 4 bytes eight times the depth, + 1 where a turn ended just there, + 2 where the
--          replica's contents are told (see shared_contents.lua), + 4 where it may hold more of the page in which this
--          depth lies; and 4 bytes epoch
--          2: which of these (2 bytes, from 0 on) will soon hold more: from a block on (4), which they hold or will
--          hold, to a depth (4)
--          then the other routers' loads, as they published them
--
-- A page holds up to 16 consecutive blocks of a chain, from a multiple of 16 on, and is named by the first of them.
-- What is held is closed under prefixes, so pages are bisected, for all replicas together, and only the page in which
-- a replica's chain ends is looked at block by block.
local ns, spread = KEYS[1], unpack
local sub, find, byte, unpack, pack = string.sub, string.find, string.byte, struct.unpack, struct.pack
local PAGE, RECORD = 128, 9
local prefix, get = ns .. ':p:', redis.call

local marks = redis.call('GET', ns .. ':f')
if not marks or sub(marks, 1, 16) ~= ARGV[1] then
  return redis.error_reply('NOSTORE the index is another one')
end

-- Stamps below a replica's floor are dead: evicted since, or of an earlier incarnation. `tolds`: until when its contents
-- are told, in ms since 2025, twice, plus one where they are whole.
local MARKS = 16
local floors, epochs, tolds = {}, {}, {}
local function floor_of(slot)
  local floor = floors[slot]
  if not floor then
    if #marks >= 32 + slot * MARKS then
      floor, epochs[slot], tolds[slot] = unpack('>I6I4I6', marks, 17 + slot * MARKS)
    else
      floor, epochs[slot], tolds[slot] = 0, 0, 0
    end
    floors[slot] = floor
  end
  return floor
end
-- The first of them all at once: that is all of them, in most fleets.
local slots = math.min(math.floor((#marks - 16) / MARKS), 64)
local t = { unpack('>' .. string.rep('I6I4I6', slots), marks, 17) }
for slot = 0, slots - 1 do
  floors[slot], epochs[slot], tolds[slot] = t[slot * 3 + 1], t[slot * 3 + 2], t[slot * 3 + 3]
end
local now_ms
local function is_told(slot)
  local till = tolds[slot] or 0
  if till == 0 then
    return false
  end
  if not now_ms then
    local time = redis.call('TIME')
    now_ms = (tonumber(time[1]) - 1735689600) * 1000 + math.floor(tonumber(time[2]) / 1000)
  end
  return till / 2 > now_ms
end

local formats, holders = {}, {}
for some = 1, 16 do
  formats[some], holders[some] = string.rep('<I2>BBI5', some), string.rep('<I2>xxI5', some)
end
-- A few replicas are searched for in a page's text, many are found by reading all of it.
local FEW = 10

local found, said, more
local pages, chain

local function page(number)
  local text = pages[number]
  if text == nil then
    text = redis.call('GET', prefix .. sub(chain, number * PAGE + 1, number * PAGE + 8))
    pages[number] = text
  end
  return text
end

local tags = {}
local function tag_of(slot)
  local tag = tags[slot]
  if not tag then
    tag = pack('<I2', slot)
    tags[slot] = tag
  end
  return tag
end

-- Where the next record of a replica is among those from `at` to before `stop`, looking from `from` on.
local function next_record(text, slot, at, stop, from)
  local tag = tag_of(slot)
  local place = find(text, tag, from, true)
  while place and place < stop do
    if (place - at) % RECORD == 0 then
      return place
    end
    place = find(text, tag, place + 1, true)
  end
  return nil
end

local function holds(text, slot)
  local at, size, floor = 1, #text, floor_of(slot)
  while at < size do
    local keys, records
    keys, records, at = unpack('>BI2', text, at)
    at = at + keys * 8
    local stop = at + records * RECORD
    local place = next_record(text, slot, at, stop, at)
    while place do
      if unpack('>I5', text, place + 4) >= floor then
        return true
      end
      place = next_record(text, slot, at, stop, place + 1)
    end
    at = stop
  end
  return false
end

-- Where the records of a page begin that has one path, as most have; nil for others.
local function records_at(text)
  local keys, high, low = byte(text, 1, 3)
  local at = keys * 8 + 4
  return #text == at - 1 + RECORD * (high * 256 + low) and at or nil
end

-- A replica's chain ends in a page of one path, where it has one record: how far it goes. Whether that is so.
local function ends_here(number, text, at, place, slot)
  local len, own = byte(text, place + 2, place + 3)
  if find(text, tag_of(slot), place + RECORD, true)
    or sub(text, 4, len * 8 + 3) ~= sub(chain, number * PAGE + 1, number * PAGE + len * 8) then
    return false
  end
  if own > 127 then
    own, more[slot] = own - 128, true
  end
  found[slot], said[slot] = number * 16 + len, own < len
  return true
end

-- Takes those that hold the page's first block out of `set` (of `n` replicas); returns them, how many they are, and for
-- how many others it is settled that they end here. Costs as much as the fewer of the two: the page's records, or the
-- replicas that are looked for.
local function split(number, set, n)
  local text = page(number)
  local yes, count, ended = {}, 0, 0
  if not text then
    return yes, count, ended
  end
  if n <= FEW then
    local at = records_at(text)
    for slot in pairs(set) do
      local place, there = at and find(text, tag_of(slot), at, true), nil
      if place and (place - at) % RECORD == 0 and unpack('>I5', text, place + 4) >= floors[slot] then
        there = true
      elseif place or not at then
        there = holds(text, slot) and 1
      end
      if there == true and byte(text, place + 2) < 16 and ends_here(number, text, at, place, slot) then
        set[slot], ended = nil, ended + 1
      elseif there then
        set[slot], yes[slot], count = nil, true, count + 1
      end
    end
    return yes, count, ended
  end
  local at, size = 1, #text
  while at < size do
    local keys, records
    keys, records, at = unpack('>BI2', text, at)
    at = at + keys * 8
    while records > 0 do
      local some = records < 16 and records or 16
      local t = { unpack(holders[some], text, at) }
      for i = 1, some * 2, 2 do
        local slot = t[i]
        if set[slot] and t[i + 1] >= floors[slot] then
          set[slot], yes[slot], count = nil, true, count + 1
        end
      end
      at, records = at + some * RECORD, records - some
    end
  end
  return yes, count, ended
end

-- How far the `n` replicas of `set` go within a page of which all hold the first block.
local function finish(number, set, n)
  local text = page(number)
  local here = sub(chain, number * PAGE + 1, (number + 1) * PAGE)
  local best, ended = {}, {}

  local function look(slot, len, own, stamp, common)
    if stamp >= floor_of(slot) then
      if own > 127 then
        own, more[slot] = own - 128, true
      end
      local depth = len < common and len or common
      local before = best[slot] or 0
      if depth > before then
        best[slot], ended[slot] = depth, own < depth
      elseif depth == before and own >= depth then
        ended[slot] = false -- another request went on from here
      end
    end
  end

  local at, size = 1, #text
  while at < size do
    local keys, records
    keys, records, at = unpack('>BI2', text, at)
    local common, most = 0, keys * 8 < #here and keys * 8 or #here
    if sub(here, 1, most) == sub(text, at, at + most - 1) then
      common = most / 8
    else
      while sub(here, common * 8 + 1, common * 8 + 8) == sub(text, at + common * 8, at + common * 8 + 7) do
        common = common + 1
      end
    end
    at = at + keys * 8
    local stop = at + records * RECORD
    if n > FEW then
      while records > 0 do
        local some = records < 16 and records or 16
        local t = { unpack(formats[some], text, at) }
        for i = 1, some * 4, 4 do
          if set[t[i]] then
            look(t[i], t[i + 1], t[i + 2], t[i + 3], common)
          end
        end
        at, records = at + some * RECORD, records - some
      end
    else
      for slot in pairs(set) do
        local place = next_record(text, slot, at, stop, at)
        while place do
          local len, own, stamp = unpack('>BBI5', text, place + 2)
          look(slot, len, own, stamp, common)
          place = next_record(text, slot, at, stop, place + 1)
        end
      end
    end
    at = stop
  end
  for slot in pairs(set) do
    found[slot], said[slot] = number * 16 + (best[slot] or 0), ended[slot]
  end
end

-- The same for one replica, with less ado.
local function search_one(low, high, slot)
  local tag, floor, last = tag_of(slot), floors[slot], pages[low]
  while high - low > 1 do
    local middle = (low + high - (low + high) % 2) / 2
    local text = pages[middle]
    if text == nil then
      text = get('GET', prefix .. sub(chain, middle * PAGE + 1, middle * PAGE + 8))
    end
    local there = false
    if text then
      local at = records_at(text)
      local place = at and find(text, tag, at, true)
      if place and (place - at) % RECORD == 0 and unpack('>I5', text, place + 4) >= floor then
        if byte(text, place + 2) < 16 and ends_here(middle, text, at, place, slot) then
          return
        end
        there = true
      elseif place or not at then
        there = holds(text, slot)
      end
    end
    if there then
      low, last = middle, text
    else
      high = middle
    end
  end
  local at = records_at(last)
  local place = at and find(last, tag, at, true)
  if place and (place - at) % RECORD == 0 and unpack('>I5', last, place + 4) >= floor
    and ends_here(low, last, at, place, slot) then
    return
  end
  pages[low] = last
  finish(low, { [slot] = true }, 1)
end

-- All `n` of `set` hold page `low`, none holds page `high`.
local function search(low, high, set, n)
  while n > 0 do
    if n == 1 then
      return search_one(low, high, (next(set)))
    end
    if high - low == 1 then
      return finish(low, set, n)
    end
    local middle = math.floor((low + high) / 2)
    local yes, count, ended = split(middle, set, n)
    n = n - ended
    if count == 0 then
      high = middle
    else
      if count < n then
        search(low, middle, set, n - count)
      end
      low, set, n = middle, yes, count
    end
  end
end

-- To which depth a replica that holds the chain to `depth` will hold it soon, and from which block on that goes without
-- a gap. Entries of prompts on their way: see shared_pages.lua.
local soon_pages
-- The entries of a page that count: by replica, where each one's run begins and how far into the page it goes.
local function soon_page(number)
  local runs = soon_pages[number]
  if runs ~= nil then
    return runs
  end
  local text = redis.call('GET', ns .. ':s:' .. sub(chain, number * PAGE + 1, number * PAGE + 8))
  runs = text and {} or false
  local at, here = 1, text and sub(chain, number * PAGE + 1, number * PAGE + PAGE)
  while text and at < #text do
    local keys = byte(text, at)
    local tail = at + 1 + keys * 8
    local slot, epoch, run, till = unpack('>I2BI2I5', text, tail)
    floor_of(slot)
    if epoch == epochs[slot] % 256 and till > now_ms then
      local common = 0
      if sub(text, at + 1, tail - 1) == sub(here, 1, keys * 8) then
        common = keys
      else
        while common < keys
          and sub(text, at + 1 + common * 8, at + 8 + common * 8) == sub(here, common * 8 + 1, common * 8 + 8) do
          common = common + 1
        end
      end
      local of = runs[slot] or {}
      runs[slot], of[#of + 1], of[#of + 2] = of, run, common
    end
    at = tail + 10
  end
  soon_pages[number] = runs
  return runs
end

-- How far the entries of a replica go within a page, of those whose run is there from page `from` on or earlier; and
-- where that run begins.
local function soon_within(slot, number, from)
  local runs, best, first = soon_page(number), 0, nil
  local of = runs and runs[slot]
  if of then
    for i = 1, #of, 2 do
      if of[i] <= from and of[i + 1] > best then
        best, first = of[i + 1], of[i]
      end
    end
  end
  return best, first
end

local function soon_depth(slot, depth)
  local from = math.floor(depth / 16)
  if from * PAGE >= #chain or not soon_page(from) then
    return nil
  end
  local best, first = soon_within(slot, from, from)
  if best == 0 then
    return nil
  end
  local low, high = from, math.ceil(#chain / PAGE)
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    local deep, run = soon_within(slot, middle, from)
    if deep > 0 then
      low, best, first = middle, deep, run
    else
      high = middle
    end
  end
  return low * 16 + best, first * 16
end

-- Whether a turn ended in the block before `depth`, of a replica whose contents are told.
local turns
local function ended_at(slot, depth)
  local text = turns[depth]
  if text == nil then
    text = redis.call('GET', ns .. ':e:' .. sub(chain, depth * 8 - 7, depth * 8)) or ''
    turns[depth] = text
  end
  for at = 1, #text, 2 do
    if sub(text, at, at + 1) == tag_of(slot) then
      return true
    end
  end
  return false
end

local out, soon, asked = {}, {}, 0
for a = 3, #ARGV, 2 do
  chain, pages, found, said, more, soon_pages, turns = ARGV[a + 1], {}, {}, {}, {}, {}, {}
  local wanted, set, numbers = {}, {}, ARGV[a]
  for i = 1, #numbers, 2 do
    local high, low = byte(numbers, i, i + 1)
    local slot = high * 256 + low
    wanted[#wanted + 1], set[slot] = slot, true
    floor_of(slot)
  end
  if #chain > 0 then
    local yes, count = split(0, set, #wanted)
    search(0, math.ceil(#chain / PAGE), yes, count)
  end
  for from = 1, #wanted, 64 do
    local flat = {}
    for i = from, math.min(from + 63, #wanted) do
      local slot = wanted[i]
      floor_of(slot)
      local depth, flags = found[slot] or 0, said[slot] and 1 or 0
      if is_told(slot) then
        flags = (tolds[slot] % 2) * 2 + (more[slot] and 4 or 0)
        if #chain > 0 then
          local to, first = soon_depth(slot, depth)
          if to and to > depth then
            soon[#soon + 1] = pack('>I2I4I4', asked, first, to)
          end
        end
        if depth > 0 and ended_at(slot, depth) then
          flags = flags + 1
        end
      end
      flat[#flat + 1] = depth * 8 + flags
      flat[#flat + 1] = epochs[slot]
      asked = asked + 1
    end
    out[#out + 1] = pack('>' .. string.rep('I4', #flat), spread(flat))
  end
end

local reply = { table.concat(out), table.concat(soon) }
local routers = redis.call('SMEMBERS', ns .. ':routers')
for i = 1, #routers do
  if routers[i] ~= ARGV[2] then
    local load = redis.call('GET', ns .. ':load:' .. routers[i])
    if load then
      reply[#reply + 1] = load
    end
  end
end
return reply
