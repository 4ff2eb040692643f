"""What one engine is known to hold, from its own KV events. No I/O, no clock: `now` in seconds.

Events are the truth while every one of them was seen. Beside them stands what cannot be in them yet: a prompt counts as
cached from the decision on, for a few seconds, so that siblings follow it before the engine has told. Where events were
missed, a `Residency` takes over: it begins with all that was known, oldest, and what the router sends from then on
outlives it; events still correct it.

A depth is the run of leading blocks on the device, then what goes on from there in lower tiers: the order in which vLLM
looks (v1/core/sched/scheduler.py, local cache first, the connector from its end on).

Hybrid models have several KV cache groups. A block counts where every group of full attention has it. Other groups
(sliding windows, Mamba states) need only the end of a prefix; they are not looked at, so that a hit may be foretold
deeper than it is. A group of larger blocks names each by the hash of its last small one.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from router.index.gone import Gone
from router.index.held import Held
from router.index.residency import Residency
from router.index.runs import ENDED, OPEN, SHARED
from router.index.soon import Soon, present_until

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE: Final = "GPU"
"""The medium of an engine's own pool; vLLM says so on every platform."""

FULL_ATTENTION: Final = frozenset({None, "full_attention", "mla_attention", "full_attention_mla"})
"""Kinds of groups that need every block of a prefix. Engines that name no kind have one group."""


class Known:
    """The cache of one engine: one replica, or one data-parallel rank of it.

    `capacity`: blocks of the engine's pool. `bound`: the most that is remembered of what events tell, device and lower
    tiers each; events that tell of more are wrong (see `overfull`). About 100 bytes a block.
    """

    __slots__ = (
        "_gone",
        "_groups",
        "_presumed",
        "_soon",
        "_tiers",
        "_turns",
        "_unconfirmed",
        "bound",
        "capacity",
        "placed",
    )

    def __init__(self, capacity: int, bound: int, presumed: Residency | None = None) -> None:
        self.capacity = capacity
        self.bound = bound
        self.placed = 0
        """Prompts given to it so far."""
        self._unconfirmed: float | None = None  # since when prompts are answered whose blocks no event told of
        self._presumed: Residency | None = presumed or Residency(capacity)
        self._groups: dict[int, tuple[Held, int]] = {}  # full attention: with its blocks' size in hashed ones
        self._tiers: dict[str, dict[int, int]] = {}  # medium -> key -> copies
        self._soon = Soon(capacity)
        self._gone = Gone()
        self._turns: dict[int, int] = {}  # blocks of answers and ends of prompts -> OPEN, ENDED, SHARED

    # -- what the engine tells ----------------------------------------------------------------------------------

    def stored(self, keys: Sequence[int], parent: int | None, *, medium: str, group: int, scale: int) -> None:
        """Blocks of a full-attention group, each of `scale` hashed ones; on another medium: any blocks."""
        self._unconfirmed = None
        if medium != DEVICE:
            tier = self._tiers.setdefault(medium, {})
            for key in keys:
                tier[key] = tier.get(key, 0) + 1
            return
        held, _ = self._groups.setdefault(group, (Held(), scale))
        held.store(keys, parent)
        if self._soon:
            self._soon.drop(keys)

    def removed(self, keys: Sequence[int], *, medium: str, group: int | None) -> list[int]:
        """Copies of blocks are gone. Returns those of which there is none left anywhere."""
        gone = []
        if medium != DEVICE:
            tier = self._tiers.get(medium, {})
            for key in keys:
                copies = tier.get(key, 0)
                if copies > 1:
                    tier[key] = copies - 1
                elif copies:
                    del tier[key]
                    gone.append(key)
            return [key for key in gone if not self.holds(key)]
        numbers = list(self._groups) if group is None else [group]
        groups = [self._groups[number][0] for number in numbers if number in self._groups]
        for held in groups:
            gone += [key for key in keys if held.remove(key)]
        for key in gone:
            self._turns.pop(key, None)
        self._gone.add(gone)
        if self._presumed is not None:
            self._presumed.drop(key for key in keys if not any(key in held for held in groups))
        return [key for key in gone if not self.holds(key)]

    def holds(self, key: int) -> bool:
        return any(key in held for held, _ in self._groups.values()) or any(key in t for t in self._tiers.values())

    def cleared(self) -> None:
        """The engine holds nothing."""
        self._groups.clear()
        self._tiers.clear()
        self._turns.clear()
        if self._presumed is not None:
            self._presumed.clear()

    def restart(self) -> None:
        """Another process: nothing of the old one counts, and what the new one did so far is not known."""
        self.doubt()
        self.cleared()
        self._soon.clear()
        self._gone.clear()
        self._unconfirmed = None

    def tick(self, now: float) -> None:
        """Now and then. `now`: seconds."""
        self._gone.tick(now)

    def trust(self) -> None:
        """Every event there was has been seen: they alone tell what is held."""
        self._presumed = None

    def presume(self) -> None:
        """Events may not tell all: what the router itself sends counts too, and what is known may be forgotten."""
        if self._presumed is None:
            self._presumed = Residency(self.capacity)
            for held, scale in self._groups.values():
                if scale == 1:
                    self._presumed.presume(held.links())
                    break

    def doubt(self) -> None:
        """Events were missed. What is known is presumed from now on, and the first to be forgotten."""
        self.presume()
        self._groups.clear()
        self._tiers.clear()

    @property
    def trusted(self) -> bool:
        return self._presumed is None

    @property
    def overfull(self) -> bool:
        """Events tell of more blocks than the engine has: some were missed, or are told twice."""
        device = sum(held.blocks for held, _ in self._groups.values())
        return device > self.bound or any(len(tier) > self.bound for tier in self._tiers.values())

    # -- what the router asks and does --------------------------------------------------------------------------

    def __len__(self) -> int:
        """Blocks on the device, known or presumed."""
        known = max((len(held) * scale for held, scale in self._groups.values()), default=0)
        return known if self._presumed is None else max(known, len(self._presumed))

    def depth(self, keys: Sequence[int], now: float) -> int:
        """How many leading blocks of a chain are there, or will be before a request that is sent now."""
        depth = self._soon.beyond(keys, self._on_device(keys), now)
        if self._tiers:
            tiers = list(self._tiers.values())
            while depth < len(keys) and any(keys[depth] in tier for tier in tiers):
                depth += 1
        return depth

    def promised(self, keys: Sequence[int], depth: int, soon: int) -> int:
        """How deep a chain that is there to `depth` may come to be there, where others have sent prompts that reach to
        `soon`. What was dropped lately came before that, and brought nothing to stay."""
        return self._gone.before(keys, depth, soon)

    def _on_device(self, keys: Sequence[int]) -> int:
        depth = self._in_groups(keys)
        if self._presumed is not None:
            depth = max(depth, self._presumed.depth(keys))
            if self._groups and all(scale == 1 for _, scale in self._groups.values()):
                while depth < len(keys) and all(keys[depth] in held for held, _ in self._groups.values()):
                    depth += 1
        return depth

    def _in_groups(self, keys: Sequence[int]) -> int:
        depth = len(keys) if self._groups else 0
        for held, scale in self._groups.values():
            depth = min(depth, held.depth(keys) if scale == 1 else held.depth(keys[scale - 1 :: scale]) * scale)
        return depth

    def ends_a_turn(self, key: int) -> bool:
        """Whether one request was answered in this block, and nothing went on from it."""
        return self._turns.get(key) == ENDED

    def place(self, keys: Sequence[int], now: float, until: float, *, partial: bool = False) -> None:
        """A prompt was given to the engine; its prefill should be through at `until`. `partial`: see `Residency`."""
        self.placed += 1
        if not keys:
            return
        turns = self._turns
        there = self._on_device(keys)
        new = keys[there:]
        if new:
            self._soon.add(new, present_until(now, until))
            turns.setdefault(keys[-1], OPEN)
        # From the end back to where another prompt went on: that one has seen to all before it.
        for key in filter(turns.__contains__, islice(reversed(keys), 1, None)):
            if turns[key] == SHARED:
                break
            turns[key] = SHARED
        self._bound_turns()
        if self._presumed is not None:
            self._presumed.record(keys, partial=partial)

    def unconfirmed_since(self, now: float) -> float:
        """For how many seconds prompts have been answered and nothing was stored of the blocks missing here."""
        return 0.0 if self._unconfirmed is None else now - self._unconfirmed

    def answered(
        self, keys: Sequence[int], prompt_blocks: int, now: float, *, beyond: int = 0, partial: bool = False
    ) -> None:
        """A prompt's answer is whole. `keys` go on with the answer's blocks as far as they are known: only events tell
        whether they are there, but they say where a conversation's next turn may begin."""
        turns = self._turns
        state = ENDED
        for key in reversed(keys[prompt_blocks:]):
            if turns.get(key, OPEN) != OPEN:
                state = SHARED  # and so is what it goes on from
            turns[key] = state
        if prompt_blocks and prompt_blocks <= len(keys):
            last = keys[prompt_blocks - 1]
            if last in turns:
                turns[last] = state if turns[last] == OPEN else SHARED
            if self._unconfirmed is None and self._in_groups(keys[:prompt_blocks]) < prompt_blocks:
                self._unconfirmed = now
        self._bound_turns()
        if self._presumed is not None:
            self._presumed.record(keys, ended=True, beyond=beyond, partial=partial)

    def forget(self, keys: Sequence[int]) -> None:
        """These blocks, a suffix of a chain, were not computed after all, unless the engine tells of them."""
        self._soon.drop(keys)
        if self._presumed is not None:
            self._presumed.forget(keys)

    def resize(self, capacity: int) -> None:
        self.capacity = self._soon.capacity = capacity
        if self._presumed is not None:
            self._presumed.resize(capacity)

    def _bound_turns(self) -> None:
        while len(self._turns) > self.capacity:
            del self._turns[next(iter(self._turns))]
