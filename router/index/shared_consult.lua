-- Who holds how much of these chains, and what the other routers have given to the replicas. Reads only.
--
-- KEYS[1]  "{namespace}:LAYOUT": one hash tag, so that all keys lie in one slot of a cluster
-- ARGV[1]  the store's id, 16 bytes; ARGV[2] the asking router's id
-- ARGV     then for each chain: its replicas' numbers (2 bytes each); the first key of each of its pages (8 bytes each);
--          and of each of its keys the last byte but one, and the last
-- Returns  1: for each chain and replica, 4 bytes eight times the depth, + 1 where a turn ended just there, + 2 where the
--          replica's contents are told (see shared_contents.lua), + 4 where it may hold more of the page in which this
--          depth lies; and 4 bytes epoch
--          2: which of these (2 bytes, from 0 on) will soon hold more: from a block on (4), which they hold or will
--          hold, to a depth (4)
--          then the other routers' loads, as they published them
--
-- A page holds up to 16 consecutive blocks of a chain, from a multiple of 16 on, and is named by the first of them.
-- What is held is closed under prefixes, so pages are bisected, for all replicas together, and only the page in which
-- a replica's chain ends is looked at block by block. There two bytes of a key stand for it: that saves three quarters
-- of what a question has to carry; of the pages in which chains part, it makes one in ten thousand look longer, by 15
-- blocks at the most.
local ns, spread, call = KEYS[1], unpack, redis.call
local sub, find, byte, floor_ = string.sub, string.find, string.byte, math.floor
local unpack, pack, rep = struct.unpack, struct.pack, string.rep
local PAGE, RECORD, MARKS = 128, 11, 16
-- So many records, marks or answers are read or written at once.
local SOME = 64
-- A few replicas are searched for one by one, many together by reading all of a page.
local FEW = 10
local prefix = ns .. ':p:'

local marks = call('GET', ns .. ':f')
if not marks or sub(marks, 1, 16) ~= ARGV[1] then
  return redis.error_reply('NOSTORE the index is another one')
end

-- Three numbers of each replica. Its floor: stamps below it are dead, evicted since, or of an earlier incarnation. Its
-- epoch. Until when its contents are told, in ms since 2025, twice, plus one where they are whole.
-- The first of them are read all at once: that is all of them, in most fleets.
local slots = math.min(floor_((#marks - 16) / MARKS), SOME)
local known = { unpack('>' .. rep('I6I4I6', slots), marks, 17) }
local function know(slot)
  local at = slot * 3
  if not known[at + 3] then
    if #marks >= 32 + slot * MARKS then
      known[at + 1], known[at + 2], known[at + 3] = unpack('>I6I4I6', marks, 17 + slot * MARKS)
    else
      known[at + 1], known[at + 2], known[at + 3] = 0, 0, 0
    end
  end
end
local now_ms
local function is_told(till)
  if not now_ms then
    local time = call('TIME')
    now_ms = (tonumber(time[1]) - 1735689600) * 1000 + floor_(tonumber(time[2]) / 1000)
  end
  return till / 2 > now_ms
end

-- `found`: of each replica, eight times the depth, + 1 where a turn ended there, + 4 where there may be more.
local firsts, highs, lows, found
-- Pages as they are read, and the first that is known not to be there.
local pages, top

local function page(number)
  local text = pages[number]
  if text == nil then
    text = call('GET', prefix .. sub(firsts, number * 8 + 1, number * 8 + 8))
    pages[number] = text
    if not text and number < top then
      top = number
    end
  end
  return text
end

local formats = {}
local function format_of(some)
  local format = formats[some]
  if not format then
    format = rep('<I2>BBI5I2', some)
    formats[some] = format
  end
  return format
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

-- The next record of a replica that counts, among those from `at` to before `stop`, looking from `from` on: its place,
-- how many blocks it holds, from which on they are its own, and the page in which that chain ended.
local function next_record(text, slot, at, stop, from)
  local tag, floor = tag_of(slot), known[slot * 3 + 1]
  local place = find(text, tag, from, true)
  while place and place < stop do
    if (place - at) % RECORD == 0 then
      local len, own, stamp, last = unpack('>BBI5I2', text, place + 2)
      if stamp >= floor then
        return place, len, own, last
      end
    end
    place = find(text, tag, place + 1, true)
  end
  return nil
end

-- Whether the `nth` of a path's keys is the chain's.
local function same(text, at, nth, from)
  local high, low = byte(text, at + nth * 8 - 2, at + nth * 8 - 1)
  return low == byte(lows, from + nth) and high == byte(highs, from + nth)
end

-- How many of its keys, `keys` from `at` on, a path has in common with a page of the chain: one at the least, by which
-- the page is named. They name all that comes before, so that the last one in common is found by bisection.
local function common_keys(text, at, keys, number)
  local from, have = number * 16, #lows - number * 16
  local low, high = 1, keys < have and keys or have
  if same(text, at, high, from) then
    return high
  end
  while high - low > 1 do
    local middle = floor_((low + high) / 2)
    if same(text, at, middle, from) then
      low = middle
    else
      high = middle
    end
  end
  return low
end

-- What a record says of a replica of which others in its page said `before`, in which of its keys the chain has
-- `common`. The longest counts; where two are that, no turn ended there if it did not in one of them.
local function longer(number, before, len, own, common)
  local more = before % 8 >= 4 and 4 or 0
  if own > 127 then
    own, more = own - 128, 4
  end
  local depth, best, said = len < common and len or common, floor_(before / 8) - number * 16, before % 2
  if depth > best then
    best, said = depth, own < depth and 1 or 0
  elseif depth == best and own >= depth then
    said = 0 -- another request went on from here
  end
  return (number * 16 + best) * 8 + more + said
end

-- How far the `n` replicas of `set` go within the last page that they hold.
local function finish(number, text, set, n)
  for slot in pairs(set) do
    found[slot] = number * PAGE
  end
  local at, size = 1, #text
  while at < size do
    local keys, records
    keys, records, at = unpack('>BI2', text, at)
    local common = common_keys(text, at, keys, number)
    at = at + keys * 8
    local stop = at + records * RECORD
    if n > FEW then
      while at < stop do
        local some = math.min((stop - at) / RECORD, SOME)
        local t = { unpack(format_of(some), text, at) }
        for i = 1, some * 5, 5 do
          local slot = t[i]
          if set[slot] and t[i + 3] >= known[slot * 3 + 1] then
            found[slot] = longer(number, found[slot], t[i + 1], t[i + 2], common)
          end
        end
        at = at + some * RECORD
      end
    else
      for slot in pairs(set) do
        local place, len, own = next_record(text, slot, at, stop, at)
        while place do
          found[slot] = longer(number, found[slot], len, own, common)
          place, len, own = next_record(text, slot, at, stop, place + 1)
        end
      end
    end
    at = stop
  end
end

-- Where the records of a page begin that has one path, as most have; nil for others.
local function records_at(text)
  local keys, high, low = byte(text, 1, 3)
  local at = keys * 8 + 4
  return #text == at - 1 + RECORD * (high * 256 + low) and at or nil, keys
end

-- What the one record that a replica has in a page of one path says, of a part of its blocks.
local function settle(slot, number, len, own)
  if own > 127 then
    found[slot] = number * PAGE + len * 8 + 4
  else
    found[slot] = number * PAGE + len * 8 + (own < len and 1 or 0)
  end
end

-- Whether a replica holds a page, as the page in which a chain ended that it was told to hold with this one; nil if not.
-- And whether that settles how far it goes: so it is in a page of one path, of which it holds a part and has no other
-- record.
local function holds(number, text, slot)
  local size, at, keys = #text + 1, records_at(text)
  if at then
    local place, len, own, last = next_record(text, slot, at, size, at)
    if place and len < 16 and not find(text, tag_of(slot), place + RECORD, true)
      and len <= common_keys(text, 4, keys, number) then
      settle(slot, number, len, own)
      return last, true
    end
    return last
  end
  at = 1
  while at < size do
    local records
    keys, records, at = unpack('>BI2', text, at)
    at = at + keys * 8
    local stop = at + records * RECORD
    local place, _, _, last = next_record(text, slot, at, stop, at)
    if place then
      return last
    end
    at = stop
  end
  return nil
end

-- Looks for the end of one replica that holds page `low` and does not hold page `high`. `last`: a page in which it may be.
local function search_one(slot, low, high, last)
  high = top < high and top or high
  while high - low > 1 do
    local middle = last > low and last < high and last or floor_((low + high) / 2)
    local text = page(middle)
    local there, settled
    if text then
      there, settled = holds(middle, text, slot)
      if settled then
        return
      end
    end
    if there then
      low, last = middle, there == middle and middle + 1 or there
    else
      high = middle
    end
  end
  if low >= 0 then
    finish(low, page(low), { [slot] = last }, 1)
  end
end

-- Takes those of `set` that hold a page out of it. Returns those of which more is to be found out, how many they are,
-- and how many are settled.
local function split(number, text, set)
  local yes, count, settled = {}, 0, 0
  local first = number * PAGE
  local alone, keys = records_at(text)
  local common = alone and common_keys(text, 4, keys, number)
  local at, size = 1, #text
  while at < size do
    local records
    keys, records, at = unpack('>BI2', text, at)
    at = at + keys * 8
    while records > 0 do
      local some = records < SOME and records or SOME
      local t = { unpack(format_of(some), text, at) }
      for i = 1, some * 5, 5 do
        local slot = t[i]
        if set[slot] then
          if t[i + 3] >= known[slot * 3 + 1] then
            local len = t[i + 1]
            set[slot] = nil
            if alone and len < 16 and len <= common then
              settled = settled + 1
              settle(slot, number, len, t[i + 2])
            else
              yes[slot], count = t[i + 4], count + 1
            end
          end
        elseif settled > 0 then
          local so_far = found[slot]
          if so_far and so_far > first and so_far < first + PAGE and t[i + 3] >= known[slot * 3 + 1] then
            -- A second record of one that seemed settled.
            found[slot], yes[slot], count, settled = nil, t[i + 4], count + 1, settled - 1
          end
        end
      end
      at, records = at + some * RECORD, records - some
    end
  end
  return yes, count, settled
end

-- Pages are bisected for many replicas together. All `n` of `set` hold page `low`, none holds page `high`.
local function search(low, high, set, n)
  while n > FEW and high - low > 1 do
    local middle = floor_((low + high) / 2)
    local text, yes, count, settled = page(middle), nil, 0, 0
    if text then
      yes, count, settled = split(middle, text, set)
      n = n - count - settled
    end
    if n > 0 then
      if count > 0 then
        search(middle, high, yes, count)
      end
      high = middle
    else
      low, set, n = middle, yes, count
    end
  end
  if n > FEW then
    if low >= 0 then
      finish(low, page(low), set, n)
    end
  else
    for slot, last in pairs(set) do
      search_one(slot, low, high, last)
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
  local text = call('GET', ns .. ':s:' .. sub(firsts, number * 8 + 1, number * 8 + 8))
  runs = text and {} or false
  local at = 1
  while text and at < #text do
    local keys = byte(text, at)
    local tail = at + 1 + keys * 8
    local slot, epoch, run, till = unpack('>I2BI2I5', text, tail)
    know(slot)
    if epoch == known[slot * 3 + 2] % 256 and till > now_ms then
      local of = runs[slot] or {}
      runs[slot], of[#of + 1], of[#of + 2] = of, run, common_keys(text, at + 1, keys, number)
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
  local from = floor_(depth / 16)
  if from * 16 >= #lows or not soon_page(from) then
    return nil
  end
  local best, first = soon_within(slot, from, from)
  if best == 0 then
    return nil
  end
  local low, high = from, #firsts / 8
  while high - low > 1 do
    local middle = floor_((low + high) / 2)
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
    local first = floor_((depth - 1) / 16) * 8
    local name = sub(firsts, first + 1, first + 8) .. sub(highs, depth, depth) .. sub(lows, depth, depth)
    text = call('GET', ns .. ':e:' .. name) or ''
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
for a = 3, #ARGV, 4 do
  firsts, highs, lows, found, soon_pages, turns = ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], {}, {}, {}
  local wanted, set, numbers = {}, {}, ARGV[a]
  local n = #numbers / 2
  for from = 0, n - 1, SOME do
    local some = math.min(n - from, SOME)
    local t = { unpack('>' .. rep('I2', some), numbers, from * 2 + 1) }
    for i = 1, some do
      local slot = t[i]
      wanted[from + i], set[slot] = slot, 0 -- the first page is where to look first
      if not known[slot * 3 + 3] then
        know(slot)
      end
    end
  end
  pages, top = {}, #firsts / 8
  local text = top > 0 and page(0)
  if text and n > FEW and #text < n * RECORD then
    local yes, count = split(0, text, set)
    search(0, top, yes, count)
  elseif text then
    search(-1, top, set, n) -- where many are there all may be; bisecting shows it
  end
  for from = 0, n - 1, SOME do
    local flat, some = {}, math.min(n - from, SOME)
    for i = 1, some do
      local slot = wanted[from + i]
      local answer, at = found[slot] or 0, slot * 3
      local till = known[at + 3]
      if till > 0 and is_told(till) then
        local depth = floor_(answer / 8)
        answer = answer - answer % 2 + (till % 2) * 2
        if #lows > 0 then
          local to, first = soon_depth(slot, depth)
          if to and to > depth then
            soon[#soon + 1] = pack('>I2I4I4', asked + from + i - 1, first, to)
          end
        end
        if depth > 0 and ended_at(slot, depth) then
          answer = answer + 1
        end
      elseif answer % 8 >= 4 then
        answer = answer - 4
      end
      flat[i * 2 - 1], flat[i * 2] = answer, known[at + 2]
    end
    out[#out + 1] = pack('>' .. rep('I4', some * 2), spread(flat))
  end
  asked = asked + n
end

local reply = { table.concat(out), table.concat(soon) }
local routers = call('SMEMBERS', ns .. ':routers')
for i = 1, #routers do
  if routers[i] ~= ARGV[2] then
    local load = call('GET', ns .. ':load:' .. routers[i])
    if load then
      reply[#reply + 1] = load
    end
  end
end
return reply
