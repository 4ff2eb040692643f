"""What any routing could have reached on a recorded run: three ceilings for its hit rate. Pure, exact, in tokens.

A request hits at most `(prompt tokens - 1) // block size` blocks, since the engine recomputes at least the last token
of a prompt (vLLM v1/core/kv_cache_manager.py, get_computed_blocks). It leaves behind every full block of prompt and
answer whose tokens were all computed; the last token of an answer was sampled, never computed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of a recorded run: the token ids of its prompt and of its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Hit rates, 0 to 1, in tokens over all prompt tokens.

    infinite: one cache for all, that never evicts. pooled_lru: one cache as large as all pools together, least recently
    used out first. greedy_oracle: separate pools, each request to the replica that truly holds the longest prefix of it
    (of equals, to the one with the fewest requests so far), whose pool has its blocks from that moment on.
    """

    infinite: float
    pooled_lru: float
    greedy_oracle: float


@dataclass(frozen=True, slots=True)
class Demand:
    """One request in blocks: the numbers of those it leaves behind, how many of them its prompt can use, and the
    prompt's length in tokens. Equal numbers are equal prefixes.
    """

    keys: tuple[int, ...]
    usable: int
    length: int


class _Cache:
    """A pool of `blocks` blocks (None: no bound), least recently used out first, a request's tail before its head."""

    def __init__(self, blocks: int | None) -> None:
        self._blocks = blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def match(self, request: Demand) -> int:
        """Return how many leading blocks of the prompt are held, at most those that a prompt can use."""
        held = self._held
        for depth, key in enumerate(request.keys[: request.usable]):
            if key not in held:
                return depth
        return request.usable

    def insert(self, request: Demand) -> None:
        held = self._held
        # Freed tail first, so the tail is the next to be overwritten (vLLM v1/core/kv_cache_manager.py, free).
        for key in reversed(request.keys):
            held[key] = None
            held.move_to_end(key)
        if self._blocks is not None:
            while len(held) > self._blocks:
                held.popitem(last=False)


def ceilings(run: Sequence[Exchange], *, block_size: int, replicas: int, pool_blocks: int) -> Ceilings:
    """Return the ceilings of `run`, given in order of arrival, for `replicas` pools of `pool_blocks` blocks each."""
    return ceilings_of(_blocks(run, block_size), block_size=block_size, replicas=replicas, pool_blocks=pool_blocks)


def ceilings_of(requests: Sequence[Demand], *, block_size: int, replicas: int, pool_blocks: int) -> Ceilings:
    """Return the ceilings of requests whose blocks are known by number, in order of arrival."""
    return Ceilings(
        infinite=_one_cache(requests, None, block_size),
        pooled_lru=_one_cache(requests, replicas * pool_blocks, block_size),
        greedy_oracle=_greedy(requests, replicas, pool_blocks, block_size),
    )


def _blocks(run: Iterable[Exchange], block_size: int) -> list[Demand]:
    """Number the blocks of all requests: equal numbers mean an equal prefix up to and including that block."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    requests = []
    for exchange in run:
        tokens = exchange.prompt + exchange.answer
        computed = len(tokens) - 1 if exchange.answer else len(tokens)
        parent, keys = -1, []
        for end in range(block_size, computed + 1, block_size):
            parent = numbers.setdefault((parent, tokens[end - block_size : end]), len(numbers))
            keys.append(parent)
        usable = max(0, len(exchange.prompt) - 1) // block_size
        requests.append(Demand(tuple(keys), usable, len(exchange.prompt)))
    return requests


def _rate(hit_blocks: int, requests: Sequence[Demand], block_size: int) -> float:
    asked = sum(request.length for request in requests)
    return hit_blocks * block_size / asked if asked else 0.0


def _one_cache(requests: Sequence[Demand], blocks: int | None, block_size: int) -> float:
    cache, hits = _Cache(blocks), 0
    for request in requests:
        hits += cache.match(request)
        cache.insert(request)
    return _rate(hits, requests, block_size)


def _greedy(requests: Sequence[Demand], replicas: int, pool_blocks: int, block_size: int) -> float:
    caches = [_Cache(pool_blocks) for _ in range(replicas)]
    sent = [0] * replicas
    hits = 0
    for request in requests:
        matches = [cache.match(request) for cache in caches]
        best = min(range(replicas), key=lambda i: (-matches[i], sent[i]))
        hits += matches[best]
        caches[best].insert(request)
        sent[best] += 1
    return _rate(hits, requests, block_size)
