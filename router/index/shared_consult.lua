-- Who holds how much of these chains, and what the other routers have given to the replicas. Reads only.
--
-- KEYS[1]  "{namespace}": one hash tag, so that all keys lie in one slot of a cluster
-- ARGV[1]  the store's id, 16 bytes; ARGV[2] the asking router's id
-- ARGV     then for each chain: its replicas' numbers (2 bytes each), its block keys (8 bytes each)
-- Returns  1: for each chain and replica, 4 bytes twice the depth + 1 where a turn ended just there, 4 bytes epoch;
--          then the other routers' loads, as they published them
--
-- A page holds up to 16 consecutive blocks of a chain, from a multiple of 16 on, and is named by the first of them.
-- What is held is closed under prefixes, so pages are bisected, for all replicas together, and only the page in which
-- a replica's chain ends is looked at block by block.
local ns = KEYS[1]
local sub, find, byte, unpack, pack = string.sub, string.find, string.byte, struct.unpack, struct.pack
local PAGE, RECORD = 128, 9

local marks = redis.call('GET', ns .. ':f')
if not marks or sub(marks, 1, 16) ~= ARGV[1] then
  return redis.error_reply('NOSTORE the index is another one')
end

-- Stamps below a replica's floor are dead: evicted since, or of an earlier incarnation.
local floors, epochs = {}, {}
local function floor_of(slot)
  local floor = floors[slot]
  if not floor then
    if #marks >= 26 + slot * 10 then
      floor, epochs[slot] = unpack('>I6I4', marks, 17 + slot * 10)
    else
      floor, epochs[slot] = 0, 0
    end
    floors[slot] = floor
  end
  return floor
end

local MANY = '>' .. string.rep('I2BBI5', 16)
local ONE = '>I2BBI5'
-- A few replicas are searched for in a page's text, many are found by reading all of it.
local FEW = 6

local found, said
local pages, chain

local function page(number)
  local text = pages[number]
  if text == nil then
    text = redis.call('GET', ns .. ':p:' .. sub(chain, number * PAGE + 1, number * PAGE + 8))
    pages[number] = text
  end
  return text
end

local tags = {}
local function tag_of(slot)
  local tag = tags[slot]
  if not tag then
    tag = pack('>I2', slot)
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

-- All replicas that hold the page's first block.
local function holders(text)
  local alive, at, size = {}, 1, #text
  while at < size do
    local keys, records
    keys, records, at = unpack('>BI2', text, at)
    at = at + keys * 8
    while records >= 16 do
      local t = { unpack(MANY, text, at) }
      for i = 1, 64, 4 do
        local slot = t[i]
        if t[i + 3] >= (floors[slot] or floor_of(slot)) then
          alive[slot] = true
        end
      end
      at, records = at + 16 * RECORD, records - 16
    end
    while records > 0 do
      local slot, _, _, stamp = unpack(ONE, text, at)
      if stamp >= (floors[slot] or floor_of(slot)) then
        alive[slot] = true
      end
      at, records = at + RECORD, records - 1
    end
  end
  return alive
end

-- The replicas among `wanted` (a list) that hold the page's first block, and those that do not.
local function split(number, wanted)
  local text = page(number)
  if not text then
    return {}, wanted
  end
  local yes, no = {}, {}
  local alive = #wanted > FEW and holders(text)
  for i = 1, #wanted do
    local slot = wanted[i]
    local held
    if alive then
      held = alive[slot]
    else
      held = holds(text, slot)
    end
    if held then
      yes[#yes + 1] = slot
    else
      no[#no + 1] = slot
    end
  end
  return yes, no
end

-- How far `wanted` go within a page of which all hold the first block.
local function finish(number, wanted)
  local text = page(number)
  local here = sub(chain, number * PAGE + 1, (number + 1) * PAGE)
  local best, ended = {}, {}

  local function look(slot, place, common)
    local len, own, stamp = unpack('>BBI5', text, place + 2)
    if stamp >= floor_of(slot) then
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
    if #wanted > FEW then
      for place = at, stop - 1, RECORD do
        local high, low = byte(text, place, place + 1)
        look(high * 256 + low, place, common)
      end
    else
      for i = 1, #wanted do
        local place = next_record(text, wanted[i], at, stop, at)
        while place do
          look(wanted[i], place, common)
          place = next_record(text, wanted[i], at, stop, place + 1)
        end
      end
    end
    at = stop
  end
  for i = 1, #wanted do
    local slot = wanted[i]
    found[slot] = number * 16 + (best[slot] or 0)
    said[slot] = ended[slot]
  end
end

-- All of `wanted` hold page `low`, none holds page `high`.
local function search(low, high, wanted)
  while #wanted > 0 do
    if high - low == 1 then
      return finish(low, wanted)
    end
    local middle = math.floor((low + high) / 2)
    local yes, no = split(middle, wanted)
    if #yes > 0 and #no > 0 then
      search(low, middle, no)
      low, wanted = middle, yes
    elseif #yes > 0 then
      low = middle
    else
      high = middle
    end
  end
end

local out = {}
for a = 3, #ARGV, 2 do
  local numbers = ARGV[a]
  chain, pages, found, said = ARGV[a + 1], {}, {}, {}
  local wanted = {}
  for i = 1, #numbers, 2 do
    local high, low = byte(numbers, i, i + 1)
    wanted[#wanted + 1] = high * 256 + low
    floor_of(high * 256 + low)
  end
  local count = math.ceil(#chain / PAGE)
  if count > 0 then
    local yes = split(0, wanted)
    search(0, count, yes)
  end
  for i = 1, #wanted do
    local slot = wanted[i]
    out[#out + 1] = pack('>I4I4', (found[slot] or 0) * 2 + (said[slot] and 1 or 0), epochs[slot])
  end
end

local reply = { table.concat(out) }
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
