-- Blocks that replicas were made to hold, or turned out not to. One call is one slice of bounded work.
--
-- ARGV     after the store's id and the seconds, for each operation a head and block keys (8 bytes each), a part of a
--          chain from a multiple of 16 on. Head: kind (1), replica's number (2), its epoch (4), touch base (6; 0 asks for
--          one), first block of the part (4), blocks of the whole chain (4), the prompt's last whole block (4), for how
--          many ms it counts as there before a writer must have told of it (4)
-- Returns  for each operation its touch base, or -1 where the epoch is over, and how many of its blocks were done; a
--          call that has done enough leaves the rest for the next
--
-- Residency is LRU, as the engine's: each touched block takes the next number of its replica's clock, the tail of a
-- chain the lowest. Numbers are kept in bins of 1/64 of the pool. Each bin counts the blocks whose last touch it is;
-- as long as all bins hold more than the pool, the lowest one falls below the floor, and what is stamped with it is
-- presumed evicted. Nothing is ever deleted for that: readers compare stamps with the floor.
--
-- Of a replica whose contents are told (see shared_contents.lua) nothing is presumed: a prompt on its way is kept apart,
-- for as long as it takes until an event must have told of it, and the end of a turn is a key of its own.
local HELD, ENDED, FORGET = 1, 2, 3 -- and 4, told again: as it was
-- Records of one replica in a page, and paths in it, at the most.
local KEPT, PATHS = 8, 64

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

local function put(name, slot, state, kind, keys, start, total, prompt_end, stamp, prune)
  local paths, touched = read(redis.call('GET', name), prune), {}
  local tag, floor = pack('<I2', slot), floor_of(slot)
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
    if start + n == total and longest == n and opened < n then
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
  path.records = path.records .. pack(ONE, slot, n, own, stamp, math.min(floor_((total - 1) / 16), 65535))
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
  local paths, tag, floor = read(text, false), pack('<I2', slot), floor_of(slot)
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
        local rest = keep > 0 and pack(ONE, slot, keep, math.min(own, keep), stamp, 0) or ''
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

-- The first page of a part from which on a replica is not known to hold the chain.
local function first_missing(slot, chain)
  local tag, floor = pack('<I2', slot), floor_of(slot)
  local low, high = 0, math.ceil(#chain / PAGE) -- low: all before are held
  while low < high do
    local middle = floor_((low + high) / 2)
    local text = redis.call('GET', ns .. ':p:' .. sub(chain, middle * PAGE + 1, middle * PAGE + 8))
    local holds = false
    for _, path in ipairs(text and read(text, false) or {}) do
      holds = holds or next_record(path.records, tag, 1, floor) ~= nil
    end
    if holds then
      low = middle + 1
    else
      high = middle
    end
  end
  return math.max(low - 1, 0)
end

local function put_soon(slot, epoch, keys, first, till)
  local name = ns .. ':s:' .. sub(keys, 1, 8)
  local out, last = soon_of(redis.call('GET', name), function(path, who, of, from, over)
    if who == slot and of == epoch % 256 and path == sub(keys, 1, #path) then
      -- One run with this one: it began where the earlier did, and counts as long as the longer.
      first, till = math.min(first, from), math.max(till, over)
      return nil
    end
    return path
  end)
  while #out >= ENTRIES do
    table.remove(out, 1)
  end
  out[#out + 1] = char(#keys / 8) .. keys .. pack(SOON, slot, epoch % 256, first, till)
  redis.call('SET', name, table.concat(out), 'PX', exact(math.max(last, till) - now_ms))
end

-- One part of what became of a chain at a replica whose contents are told. Returns its base and how many blocks were
-- done. The base is where what is missing begins, as a page's number plus one.
local function beside(kind, slot, epoch, base, chain, start, total, prompt_end, ms)
  local blocks = #chain / 8
  if kind == ENDED then
    if start + blocks == total then
      local last = floor_((blocks - 1) / 16)
      local name = turn(sub(chain, last * PAGE + 1), blocks - last * 16)
      local before, tag = redis.call('GET', name) or '', pack('<I2', slot)
      for at = 1, #before, 2 do
        if sub(before, at, at + 1) == tag then
          return base, blocks
        end
      end
      redis.call('SET', name, before .. tag, 'EX', ttl)
    end
  elseif kind == FORGET then
    for at = 1, #chain, PAGE do
      local keep = math.max(prompt_end - (start + (at - 1) / 8), 0)
      local keys = sub(chain, at, at + PAGE - 1)
      cut_soon(ns .. ':s:' .. sub(keys, 1, 8), slot, function(path)
        return common_keys(path, keys) > keep and keep or #path / 8
      end)
    end
  elseif kind == HELD and ms > 0 then
    local at = 1
    if base == 0 then
      local missing = first_missing(slot, chain)
      if (missing + 1) * 16 >= blocks and start + blocks < total then
        return 0, blocks -- all of this part is held
      end
      base = math.min(start / 16 + missing, 65535) + 1
      at = missing * PAGE + 1
      -- Somebody goes on from here, should a turn have ended within this page.
      local marks_of, here = {}, sub(chain, at, at + PAGE - 1)
      for nth = 1, #here / 8 do
        marks_of[nth] = turn(here, nth)
      end
      if #marks_of > 0 then
        redis.call('DEL', spread(marks_of))
      end
    end
    for from = at, #chain, PAGE do
      if work >= ENOUGH then
        return base, (from - 1) / 8
      end
      put_soon(slot, epoch, sub(chain, from, from + PAGE - 1), base - 1, now_ms + ms)
    end
  end
  return base, blocks
end

local done = {}
for a = 3, #ARGV, 2 do
  if work >= ENOUGH then
    break
  end
  local kind, slot, epoch, base, start, total, prompt_end, ms = unpack('>BI2I4I6I4I4I4I4', ARGV[a])
  local chain, state = ARGV[a + 1], state_of(slot)
  local blocks = #chain / 8
  if epoch ~= state.epoch then
    base = -1
  elseif is_told(slot) then
    if base > 65536 then
      base = 0 -- it was begun when nothing was told
    end
    base, blocks = beside(kind, slot, epoch, base, chain, start, total, prompt_end, ms)
  else
    if base < floor_of(slot) * state.bin then
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
        -- Dead records of other replicas are cleared away now and then.
        local prune = (first / 16 + epoch + base) % 16 == 0
        put(name, slot, state, kind, keys, first, total, prompt_end, floor_((base - first) / state.bin), prune)
      end
    end
  end
  done[#done + 1] = base
  done[#done + 1] = blocks
end

settle()
return done
