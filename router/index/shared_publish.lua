-- A router's own load, under a lease; the other routers' in return.
--
-- KEYS[1]  "{namespace}:LAYOUT"
-- ARGV[1]  the store's id; ARGV[2] the router's id; ARGV[3] the lease in ms, 0 to leave; ARGV[4] its load
-- ARGV[5]  replicas (2 bytes each) whose contents it would tell, for one lease; a replica has one writer
-- ARGV[6]  replicas that it can no longer tell of
-- Returns  a byte for each of ARGV[5], 1 where it is the writer; how many replicas have a number; then the other
--          routers' loads
local ns, me, lease = KEYS[1], ARGV[2], tonumber(ARGV[3])
local head = redis.call('GETRANGE', ns .. ':f', 0, 15)
if head ~= ARGV[1] then
  return redis.error_reply('NOSTORE the index is another one')
end

local routers = ns .. ':routers'
if lease > 0 then
  redis.call('SET', ns .. ':load:' .. me, ARGV[4], 'PX', lease)
  redis.call('SADD', routers, me)
else
  redis.call('DEL', ns .. ':load:' .. me)
  redis.call('SREM', routers, me)
end

-- Until when a replica's contents are told (6 bytes, from 26 + 16 times its number on): ms since 2025, twice, plus one
-- where they are whole.
local time = redis.call('TIME')
local till = (tonumber(time[1]) - 1735689600) * 1000 + math.floor(tonumber(time[2]) / 1000) + lease
local function told(slot, value)
  redis.call('SETRANGE', ns .. ':f', 26 + slot * 16, struct.pack('>I6', value))
end

local function give_up(slot)
  local key = ns .. ':writer:' .. slot
  if redis.call('GET', key) == me then
    redis.call('DEL', key)
    told(slot, 0)
  end
end
for i = 1, #ARGV[6], 2 do
  give_up((struct.unpack('>I2', ARGV[6], i)))
end

local writes = {}
for i = 1, #ARGV[5], 2 do
  local slot = struct.unpack('>I2', ARGV[5], i)
  local key = ns .. ':writer:' .. slot
  local mine = redis.call('GET', key) == me
  if mine then
    redis.call('PEXPIRE', key, lease)
    local before = redis.call('GETRANGE', ns .. ':f', 26 + slot * 16, 31 + slot * 16)
    local value = #before == 6 and struct.unpack('>I6', before) or 0
    if value > 0 then
      told(slot, till * 2 + value % 2)
    end
  else
    mine = redis.call('SET', key, me, 'NX', 'PX', lease) and true or false
  end
  writes[#writes + 1] = mine and '\1' or '\0'
end

local reply = { table.concat(writes), redis.call('HLEN', ns .. ':names') }
for _, router in ipairs(redis.call('SMEMBERS', routers)) do
  if router ~= me then
    local load = redis.call('GET', ns .. ':load:' .. router)
    if load then
      reply[#reply + 1] = load
    else
      redis.call('SREM', routers, router)
    end
  end
end
return reply
