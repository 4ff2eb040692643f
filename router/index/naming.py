"""What an engine calls its blocks, and what the router calls them. No I/O.

The router names a prompt's blocks by the engine's own hashes. Whether it does that right is proven by the first root
block that an engine stores: its event carries the token ids, so that its hash can be computed again. A hash that no
algorithm and no likely seed yields (a random seed, say) is translated: the token ids in the events give each block the
router's own name, and the engine's name stands for that from then on. That costs about 190 bytes a block more.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from router.prompt.blocks import ALGORITHMS, Hasher
from router.prompt.hashing import Hashing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from router.index.events import Stored


_NO_KEYS = (TypeError, ValueError, IndexError)
"""What extra keys of kinds that no engine has yet come to."""


class Mode(Enum):
    """How an engine's names are understood."""

    UNPROVEN = "not proven yet"
    PROVEN = "proven"
    TRANSLATED = "translated through token ids"


class Naming:
    """One engine's names. `hashing`: what the router names prompts by for this engine: assumed at first, then proven.

    `block_size`: tokens in a hashed block. `lora_path`: an adapter's path by its name, None where that is not known.
    """

    def __init__(self, assumed: Hashing, block_size: int, lora_path: Callable[[str], str | None]) -> None:
        self._lora_path = lora_path
        self.assume(assumed, block_size)

    def assume(self, assumed: Hashing, block_size: int) -> None:
        """What is likely for the engine that is there now; nothing is proven."""
        self.mode = Mode.UNPROVEN
        self.hashing = assumed
        self._assumed = assumed
        self.block_size = block_size
        self._tags_seen = False
        self._own = Hasher(assumed.algorithm, assumed.seed)
        self._digests: dict[int, bytes] = {}  # translation: the engine's key -> the router's digest

    def forget(self) -> None:
        """Another process may name its blocks in another way."""
        self.assume(self._assumed, self.block_size)

    @property
    def translated(self) -> int:
        """Blocks whose names are kept for translation."""
        return len(self._digests)

    def stored(self, event: Stored) -> tuple[list[int], int | None] | None:
        """The router's keys of stored blocks and of their parent; None where the event does not suffice for that."""
        if event.parent is None and event.tokens and event.block_size == self.block_size:
            self._learn(event)
        if self.mode is not Mode.TRANSLATED:
            return event.keys, event.parent
        if not event.tokens:
            known = [self._digests.get(key) for key in event.keys]
            return [_key(digest) for digest in known if digest is not None], None
        return self._translate(event)

    def removed(self, keys: Sequence[int]) -> list[int]:
        if self.mode is not Mode.TRANSLATED:
            return list(keys)
        return [_key(self._digests[key]) for key in keys if key in self._digests]

    def drop(self, engine_keys: Iterable[int], gone: Iterable[int]) -> None:
        """Of these names, those of blocks (`gone`, the router's keys) that are held nowhere are needed no more."""
        if self._digests:
            lost = set(gone)
            for key in engine_keys:
                digest = self._digests.get(key)
                if digest is not None and _key(digest) in lost:
                    del self._digests[key]

    def clear(self) -> None:
        """The engine holds nothing."""
        self._digests.clear()

    # -- proof --------------------------------------------------------------------------------------------------

    def _learn(self, root: Stored) -> None:
        extra = root.extra[0] if root.extra else None
        if self.mode is Mode.UNPROVEN:
            found = self._search(root, extra)
            if found is not None:
                self.mode, self.hashing = Mode.PROVEN, found
                self._tags_seen = bool(extra)
            elif self._understood(extra, root.lora_name):
                # All that was hashed into the block is known here. So it is the seed that is not.
                self.mode, self.hashing = Mode.TRANSLATED, self._assumed
        elif self.mode is Mode.PROVEN and extra and not self._tags_seen:
            for tagged in (True, False):
                if self._yields(replace(self.hashing, tagged=tagged), root, extra):
                    self.hashing, self._tags_seen = replace(self.hashing, tagged=tagged), True
                    return

    def _search(self, root: Stored, extra: list[Any] | None) -> Hashing | None:
        algorithms = [self._assumed.algorithm, *(a for a in ALGORITHMS if a != self._assumed.algorithm)]
        seeds = dict.fromkeys((self._assumed.seed, None, "0"))
        for algorithm in algorithms:
            for seed in seeds:
                for tagged in (True, False) if extra else (self._assumed.tagged,):
                    hashing = Hashing(algorithm, seed, tagged)
                    if self._yields(hashing, root, extra):
                        return hashing
        return None

    def _understood(self, extra: list[Any] | None, lora_name: str | None) -> bool:
        """Whether a block's extra keys are nothing but salts and adapters of known paths."""
        plain = all(isinstance(key, str) for key in extra or ())
        return plain and (lora_name is None or self._lora_path(lora_name) is not None)

    def _yields(self, hashing: Hashing, root: Stored, extra: list[Any] | None) -> bool:
        if root.lookahead:
            return False
        hasher = Hasher(hashing.algorithm, hashing.seed)
        try:
            keys = self._extra_keys(extra, root.lora_name, tagged=hashing.tagged)
            return _key(hasher.block(hasher.none_hash, root.tokens[: root.block_size], keys)) == root.keys[0]
        except _NO_KEYS:
            return False

    def _extra_keys(self, extra: list[Any] | None, lora_name: str | None, *, tagged: bool) -> tuple[Any, ...] | None:
        """A block's extra keys as they were hashed; events show them untagged and without an adapter's path."""
        if not extra:
            return None
        keys: list[Any] = []
        for place, key in enumerate(extra):
            if isinstance(key, list):
                keys.append(("mm", *key) if tagged else tuple(key))
            elif not tagged:
                keys.append(key)
            elif isinstance(key, bytes):
                keys.append(("prompt_embeds", key))
            elif place == 0 and key == lora_name:
                keys.append(("lora", key, self._lora_path(key) or ""))
            else:
                keys.append(("cache_salt", key))
        return tuple(keys)

    # -- translation --------------------------------------------------------------------------------------------

    def _translate(self, event: Stored) -> tuple[list[int], int | None] | None:
        if event.block_size != self.block_size:
            return None
        hasher = self._own
        digest = hasher.none_hash if event.parent is None else self._digests.get(event.parent)
        if digest is None:
            return None
        parent = None if event.parent is None else _key(digest)
        size, extras = event.block_size, event.extra or ()
        try:
            if any(extras):
                digests = []
                for place in range(len(event.keys)):
                    extra = extras[place] if place < len(extras) else None
                    keys = self._extra_keys(extra, event.lora_name, tagged=self._assumed.tagged)
                    digest = hasher.block(digest, event.tokens[place * size : (place + 1) * size], keys)
                    digests.append(digest)
            else:
                digests = hasher.digests(digest, event.tokens, size)
        except _NO_KEYS:
            return None
        self._digests.update(zip(event.keys, digests, strict=True))
        return [_key(each) for each in digests], parent


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")
