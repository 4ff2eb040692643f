"""What is held, cut into pages, against the plain rule for what can be reached."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.index.pages import KEPT, PAGE_BLOCKS, Page, Pages


class Engine:
    """Blocks by number; a block's parent is fixed, as its hash is."""

    def __init__(self) -> None:
        self.device: set[int] = set()
        self.lower: set[int] = set()
        self.pages = Pages(self.reach, self.holds, 100_000)
        self.told: dict[int, list[list[int]]] = {}

    def holds(self, key: int) -> bool:
        return key in self.device or key in self.lower

    def reach(self, keys: Sequence[int], device: bool) -> tuple[int, bool]:
        reach = 0
        while device and reach < len(keys) and keys[reach] in self.device:
            reach += 1
        before = reach
        while reach < len(keys) and keys[reach] in self.lower:
            reach += 1
        return reach, device and reach == before

    def store(self, keys: list[int], parent: int | None = None) -> None:
        self.device.update(keys)
        self.pages.stored(keys, parent)

    def remove(self, *keys: int) -> None:
        self.device.difference_update(keys)
        self.pages.changed(keys, removed=True)

    def offload(self, *keys: int) -> None:
        self.lower.update(keys)
        self.pages.changed(keys, removed=False)

    def tell(self, at_once: int = 3) -> list[Page]:
        said = []
        while self.pages.waiting:
            said += self.pages.take(at_once)
        for page in said:
            self.told[page.name] = page.paths
            if not page.paths:
                del self.told[page.name]
        return said

    def depth(self, chain: list[int]) -> int:
        """As the store answers: pages are closed under prefixes, the last is looked at block by block."""
        depth = 0
        for start in range(0, len(chain), PAGE_BLOCKS):
            here = chain[start : start + PAGE_BLOCKS]
            best = 0
            for path in self.told.get(here[0], []):
                common = 0
                while common < min(len(path), len(here)) and path[common] == here[common]:
                    common += 1
                best = max(best, common)
            if not best:
                break
            depth = start + best
        return depth

    def truth(self, chain: list[int]) -> int:
        depth = 0
        while depth < len(chain) and chain[depth] in self.device:
            depth += 1
        while depth < len(chain) and chain[depth] in self.lower:
            depth += 1
        return depth


def test_a_chain_grows_block_by_block_and_goes_from_its_end() -> None:
    engine = Engine()
    chain = list(range(1, 41))
    for place, key in enumerate(chain):
        engine.store([key], chain[place - 1] if place else None)
        engine.tell()
        assert engine.depth(chain) == place + 1
    assert sorted(engine.told) == [1, 17, 33]
    for key in chain[:19:-1]:
        engine.remove(key)
    assert [(page.name, len(page.paths), page.removed) for page in engine.tell()] == [(33, 0, True), (17, 1, True)]
    assert engine.depth(chain) == 20
    engine.remove(*chain[:20])
    engine.tell()
    assert (engine.told, len(engine.pages)) == ({}, 0)


def test_many_events_in_one_page_are_one_message() -> None:
    engine = Engine()
    engine.store(list(range(1, 17)))
    engine.remove(16, 15)
    engine.store([15, 16], 14)
    assert engine.tell() == [Page(1, [list(range(1, 17))], more=False, removed=True)]


def test_a_hole_hides_what_is_behind_it_until_it_is_filled() -> None:
    engine = Engine()
    chain = list(range(1, 61))
    engine.store(chain)
    engine.tell()
    engine.remove(5)
    engine.tell()
    assert engine.told == {1: [[1, 2, 3, 4]]}
    engine.store([5], 4)
    engine.tell(1)
    assert engine.depth(chain) == 60
    engine.remove(20)
    engine.remove(60, 59)
    engine.tell()
    assert engine.depth(chain) == 19
    engine.store([20], 19)
    engine.tell()
    assert engine.depth(chain) == 58


def test_lower_tiers_count_where_the_device_ends() -> None:
    engine = Engine()
    chain = list(range(1, 41))
    engine.store(chain)
    engine.offload(*chain[:30])
    engine.remove(*chain[10:20])
    engine.tell()
    # vLLM looks on the device first, and from there on in what the connector has: not on the device again.
    assert engine.depth(chain) == engine.truth(chain) == 30
    engine.remove(*chain)
    engine.tell()
    assert engine.depth(chain) == 30


def test_where_chains_part_in_one_page_the_last_are_told() -> None:
    engine = Engine()
    engine.store([1, 2, 3])
    for n in range(20):
        engine.store([100 + n, 200 + n], 3)
    (page,) = engine.tell()
    assert page.paths == [[1, 2, 3, 100 + n, 200 + n] for n in range(20 - KEPT, 20)]
    assert page.more
    for n in range(19, KEPT - 1, -1):
        engine.remove(200 + n, 100 + n)
    (page,) = engine.tell()
    assert page.paths == [[1, 2, 3, 100 + n, 200 + n] for n in range(KEPT)]
    assert not page.more


def test_blocks_of_no_known_place_are_passed_over() -> None:
    engine = Engine()
    engine.store([7, 8], 6)
    engine.remove(7)
    assert engine.tell() == []
    small = Pages(engine.reach, engine.holds, bound=10)
    engine.device.update(range(1, 41))
    small.stored(range(1, 41), None)
    assert len(small) == 10
    assert small.take(5) == [Page(1, [list(range(1, 11))], more=False, removed=False)]


def test_everything_again_in_the_order_in_which_it_began() -> None:
    engine = Engine()
    for start in (300, 100, 200):
        engine.store(list(range(start, start + 20)))
    engine.tell()
    assert engine.pages.all_again() == 6
    assert [page.name for page in engine.tell()] == [300, 316, 100, 116, 200, 216]


def test_random_lives_of_blocks() -> None:
    """Chains that part anywhere, removals in any order, two tiers, and messages at any time."""
    draw = random.Random(3)
    for _ in range(40):
        engine = Engine()
        next_key = iter(range(1, 1_000_000))
        chains: list[list[int]] = []
        for _ in range(draw.randint(1, 9)):
            stem = draw.choice(chains)[: draw.randint(0, 60)] if chains else []
            chains.append(stem + [next(next_key) for _ in range(draw.randint(1, 50))])
        for step in range(300):
            chain = draw.choice(chains)
            what = draw.random()
            if what < 0.5:
                start = min(engine.truth(chain), draw.randint(0, len(chain)))
                engine.store(chain[start : start + draw.randint(1, 40)], chain[start - 1] if start else None)
            elif what < 0.85:
                for key in draw.sample(chain, min(len(chain), draw.randint(1, 6))):
                    if draw.random() < 0.8:
                        engine.remove(key)
                    else:
                        engine.lower.discard(key)
                        engine.pages.changed([key], removed=True)
            elif what < 0.95:
                engine.offload(*[key for key in draw.sample(chain, min(len(chain), 8)) if key in engine.device])
            else:
                engine.pages.all_again()
            if draw.random() < 0.3:
                engine.tell(draw.randint(1, 5))
                for each in chains:
                    told, truth = engine.depth(each), engine.truth(each)
                    assert told <= truth, step
                    if engine.pages.all_again() and step % 3 == 0:
                        engine.tell()
                        assert engine.depth(each) == told
        for chain in chains:
            engine.remove(*chain)
            engine.lower.clear()
            engine.pages.changed(chain, removed=True)
        engine.tell()
        assert (engine.told, len(engine.pages)) == ({}, 0)
