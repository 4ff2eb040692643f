-- A router's own load, under a lease; the other routers' in return.
--
-- KEYS[1]  "{namespace}"
-- ARGV[1]  the store's id; ARGV[2] the router's id; ARGV[3] the lease in ms, 0 to leave; ARGV[4] its load
-- ARGV[5]  replicas (2 bytes each) whose events it would write, for one lease; a replica has one writer
-- Returns  a byte for each of these, 1 where it is the writer; then the other routers' loads
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

local writes = {}
for i = 1, #ARGV[5], 2 do
  local key = ns .. ':writer:' .. struct.unpack('>I2', ARGV[5], i)
  local mine = redis.call('GET', key) == me
  if lease == 0 then
    if mine then
      redis.call('DEL', key)
    end
    mine = false
  elseif mine then
    redis.call('PEXPIRE', key, lease)
  else
    mine = redis.call('SET', key, me, 'NX', 'PX', lease) and true or false
  end
  writes[#writes + 1] = mine and '\1' or '\0'
end

local reply = { table.concat(writes) }
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
