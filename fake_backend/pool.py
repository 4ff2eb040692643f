"""The KV block pool: which blocks are free, which hold a prefix, and in what order they are reused.

The rules are those of vLLM v1/core/block_pool.py:

- block 0 is the null block, so a pool of N blocks has N - 1 to give;
- one free queue: allocation takes from its head and forgets what the taken block held;
- a released block that holds a full, hashed block goes to the tail (LRU), any other to the head (reused first);
- a hit takes a block out of the free queue without moving what it holds;
- the same content computed twice lives in two blocks; a lookup finds the older one.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fake_backend.request import Request


@dataclass(frozen=True, slots=True)
class Removed:
    """A cached block was forgotten, because its place was needed."""

    key: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was forgotten at once."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Full blocks ``first`` .. ``last`` - 1 of a request were registered."""

    request: Request
    first: int
    last: int


CacheEvent = Stored | Removed | Cleared


class PoolExhaustedError(Exception):
    """More blocks were asked for than are free; the scheduler must never let it come to that."""


class BlockPool:
    """Blocks by number, 1 .. num_blocks - 1; keys are block hashes, any int."""

    def __init__(self, num_blocks: int, *, caching: bool = True, record: bool = False) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.caching = caching
        self.record = record
        self.events: list[CacheEvent] = []
        """What entered and left the cache since somebody last took this list, as it occurred; kept if ``record``."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._key: list[int | None] = [None] * num_blocks
        self._holders: dict[int, int | dict[int, None]] = {}

    @property
    def usable(self) -> int:
        """Blocks that requests can ever hold."""
        return self.num_blocks - 1

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody references; those that still hold a prefix count as free."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """0..1, as ``vllm:kv_cache_usage_perc`` has it."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    @property
    def cached_keys(self) -> int:
        """How many distinct blocks of content a lookup could find."""
        return len(self._holders)

    def lookup(self, keys: Sequence[int], limit: int) -> list[int]:
        """Blocks that hold the longest run of ``keys`` from the first one, at most ``limit``."""
        found: list[int] = []
        if not self.caching:
            return found
        holders = self._holders
        for key in keys[:limit]:
            holder = holders.get(key)
            if holder is None:
                break
            found.append(holder if isinstance(holder, int) else next(iter(holder)))
        return found

    def holds(self, key: int) -> bool:
        return key in self._holders

    def evictable(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` sit in the free queue, and would be taken from it by a hit."""
        references = self._references
        return sum(1 for block in blocks if references[block] == 0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Reference blocks found by :meth:`lookup`."""
        references, free = self._references, self._free
        for block in blocks:
            if references[block] == 0:
                del free[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks from the head of the free queue; what they held is forgotten."""
        free = self._free
        if count > len(free):
            raise PoolExhaustedError(f"{count} blocks wanted, {len(free)} free")
        references, keys = self._references, self._key
        taken: list[int] = []
        for _ in range(count):
            block, _none = free.popitem(last=False)
            key = keys[block]
            if key is not None:
                self._forget(block, key)
            references[block] = 1
            taken.append(block)
        return taken

    def register(self, request: Request, full_blocks: int) -> None:
        """The first ``full_blocks`` blocks of a sequence hold what its keys say, and can be found from now on."""
        first = request.registered
        if not self.caching or full_blocks <= first:
            return
        for index in range(first, full_blocks):
            block, key = request.blocks[index], request.keys[index]
            assert self._references[block] > 0
            assert self._key[block] is None
            self._key[block] = key
            holder = self._holders.get(key)
            if holder is None:
                self._holders[key] = block
            elif isinstance(holder, int):
                self._holders[key] = {holder: None, block: None}
            else:
                holder[block] = None
        request.registered = full_blocks
        if self.record:
            self.events.append(Stored(request, first, full_blocks))

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's blocks, given in the order of its tokens.

        They go back tail first, so that the head of a prompt outlives its tail.
        """
        references, free, keys = self._references, self._free, self._key
        unhashed: list[int] = []
        for block in reversed(blocks):
            references[block] -= 1
            assert references[block] >= 0
            if references[block]:
                continue
            if keys[block] is None:
                unhashed.append(block)
            else:
                free[block] = None
        for block in reversed(unhashed):
            free[block] = None
            free.move_to_end(block, last=False)

    def forget(self, blocks: Iterable[int]) -> None:
        """Blocks whose content turned out to be wrong (a failed transfer) lose their keys, whoever references them."""
        for block in blocks:
            key = self._key[block]
            if key is not None:
                self._forget(block, key)

    def clear(self) -> bool:
        """Forget everything; refused (False) while any block is referenced, as vLLM's reset_prefix_cache does."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._holders.clear()
        self._key = [None] * self.num_blocks
        if self.record:
            self.events.append(Cleared())
        return True

    def _forget(self, block: int, key: int) -> None:
        self._key[block] = None
        holder = self._holders[key]
        if isinstance(holder, int):
            del self._holders[key]
        else:
            del holder[block]
            if not holder:
                del self._holders[key]
        if self.record:
            self.events.append(Removed(key))
