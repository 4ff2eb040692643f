"""What was tokenized and hashed before, so that a prompt costs what is new in it.

A prompt is a row of pieces. Each piece's token ids are kept by its own digest, whatever stood before it; the blocks
that it fills are kept by the digest of the row up to it, for each way of hashing.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from xxhash import xxh3_128_digest

from router.prompt.blocks import Chain, grow
from router.prompt.cache import Bounded
from router.prompt.segments import MIN_PIECE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.prompt.blocks import Extra, Links, Run
    from router.prompt.bodies import Known

Piece: TypeAlias = "str | bytes | array[int]"
"""Text to tokenize; or what needs no tokenizing: bytes, or token ids."""

Units: TypeAlias = "bytes | array[int]"

_NOTHING: Final = array("i")

IDS_IN_PIECE: Final = 1024
"""Token ids given by a client are cut into pieces of this many."""

_LINK_BYTES: Final = 400  # a Link, its Run, digest and tail
_KEY_BYTES: Final = 8
# What a row stands on is marked as used again once so large a part of the memory was written meanwhile.
_USED_AGAIN: Final = 64
_LONGEST_SALT: Final = 256


class Link:
    """The blocks of one piece, in a row that begins with a prompt's first piece. `blocks` and `length`: full blocks and
    tokens (or bytes) up to the end of this piece. `used`: how much was written (`Bounded.written`) when those that it
    stands on last counted as used."""

    __slots__ = ("_gone_on", "_keys", "blocks", "key", "length", "parent", "run", "used")

    def __init__(self, key: bytes, parent: Link | None, run: Run, blocks: int, length: int) -> None:
        self.key = key
        self.parent = parent
        self.run = run
        self.blocks = blocks
        self.length = length
        self.used = 0
        self._keys: array[int] | None = None
        self._gone_on = False

    @property
    def weight(self) -> int:
        """Bytes, about."""
        held = _KEY_BYTES * len(self._keys) if self._keys is not None else 0
        return _LINK_BYTES + _KEY_BYTES * len(self.run.keys) + held

    def path(self) -> list[Link]:
        """It, and what it stands on, the first piece last."""
        path = []
        link: Link | None = self
        while link is not None:
            path.append(link)
            link = link.parent
        return path

    def keys(self) -> array[int]:
        """All blocks' keys up to the end of this piece. Not to be changed."""
        link: Link | None = self
        behind = []
        while link is not None and link._keys is None:
            behind.append(link)
            link = link.parent
        held = link._keys if link is not None else None
        if held is not None and not behind:
            return held
        keys = held[:] if held is not None else array("Q")
        for each in reversed(behind):
            keys += each.run.keys
        return keys

    def hold(self, keys: array[int]) -> bool:
        """Hold these keys, which are its own. Returns whether it did not yet."""
        anew = self._keys is None
        self._keys = keys
        return anew

    def hand_down(self) -> bool:
        """A row goes on from here. A conversation holds its keys once, at its end; only where a second one parts from
        it are they held, too. Returns whether this is the first one."""
        first = not self._gone_on
        if first:
            self._gone_on = True
            self._keys = None
        return first


class Memo:
    """Everything that is remembered of prompts, of all models together. `limit`: bytes in all."""

    def __init__(self, limit: int) -> None:
        # A token's id takes 4 bytes; its share of a link, and of a key that may be held twice, 2; and a body little.
        self.ids: Bounded[array[int]] = Bounded(limit * 9 // 16)
        self.links: Bounded[Link] = Bounded(limit * 5 // 16)
        self.bodies: Bounded[list[Known]] = Bounded(limit // 8)

    @property
    def held(self) -> int:
        """Bytes held, about."""
        return self.ids.held + self.links.held + self.bodies.held


class Row:
    """One prompt: what is known of its beginning (`base`, the digest of the pieces there), and its further pieces.

    `encode` makes token ids of texts, `tokenizer` tells its ids from others'; None where the pieces are units already.
    `least`: ids of texts of fewer characters are not kept, but of the few that are no whole turn.
    `before` and `after`: what the engine puts around the text. `again` gives the row of the whole prompt, for when its
    beginning is forgotten.
    """

    __slots__ = (
        "_after",
        "_again",
        "_before",
        "_encode",
        "_least",
        "_length",
        "_memo",
        "_tokenizer",
        "base",
        "digests",
        "pieces",
        "sums",
    )

    def __init__(
        self,
        memo: Memo,
        pieces: Sequence[Piece],
        *,
        base: bytes,
        encode: Callable[[list[str]], list[array[int]]] | None = None,
        tokenizer: bytes = b"",
        least: int = 0,
        before: array[int] | None = None,
        after: array[int] | None = None,
        again: Callable[[], Row] | None = None,
    ) -> None:
        """Raises ValueError for text with lone surrogates."""
        self._memo = memo
        self.pieces = pieces
        self.base = base
        self._encode = encode
        self._tokenizer = tokenizer
        self._least = least
        self._before = before
        self._after = after
        self._again = again
        self._length: int | None = None
        self.digests: list[bytes] = []
        self.sums: list[bytes] = []
        """The digest of the row up to the end of each piece."""
        for piece in pieces:
            digest = xxh3_128_digest(piece.encode() if isinstance(piece, str) else memoryview(piece).cast("B"))
            base = xxh3_128_digest(base + digest)
            self.digests.append(digest)
            self.sums.append(base)

    def __len__(self) -> int:
        """Tokens (or bytes) in all."""
        if self._length is None:
            if self._again is not None:
                self._length = len(self._again())
            else:
                self._length = sum(map(len, self._units(0)))
        return self._length

    def units(self) -> list[int] | bytes:
        """The whole prompt: token ids, or bytes."""
        if self._again is not None:
            return self._again().units()
        units = self._units(0)
        if units and isinstance(units[0], bytes):
            return b"".join(units)
        return [token for each in units for token in each]

    def chain(self, hasher: Links, block_size: int, extra: Extra) -> Chain:
        """The prompt's blocks, for one way of hashing; only blocks that are not known yet are hashed."""
        view = _view(hasher, block_size, extra)
        links, sums = self._memo.links, self.sums
        # A last piece that is short is not kept; one that something is put behind is another than in a longer row.
        kept = len(sums) if self._after is None and len(self.pieces[-1]) >= MIN_PIECE else len(sums) - 1
        link: Link | None = None
        at = kept - 1
        while at >= 0 and (link := links.get(view + sums[at])) is None:
            at -= 1
        if link is None and self._again is not None:
            link = links.get(view + self.base)
            if link is None:
                return self._again().chain(hasher, block_size, extra)
        last = link
        added: list[Link] = []
        new = array("Q")
        behind: array[int] | None = None  # of the last piece, if it is not kept
        run, blocks, length = (link.run, link.blocks, link.length) if link is not None else (None, 0, 0)
        for i, units in enumerate(self._units(at + 1), at + 1):
            if run is None:
                run = grow(hasher, hasher.none_hash, units[:0], units, block_size, extra, first=True)
            else:
                run = grow(hasher, run.digest, run.tail, units, block_size, extra, first=not blocks)
            blocks += len(run.keys)
            length += len(units)
            if i < kept:
                last = Link(view + sums[i], last, run, blocks, length)
                added.append(last)
                new += run.keys
            else:
                behind = run.keys
        assert run is not None
        self._length = length
        held = link.keys() if link is not None else None
        keys = new
        if held is not None:
            keys = held + new if new else held
        if last is not None:
            if last is not link:
                if link is None or held is None or link.hand_down():  # the two are None together
                    last.hold(keys)
                    weighs = link  # less than before
                else:
                    weighs = link if link.hold(held) else None
                if weighs is not None:
                    added.insert(0, weighs)
            self._keep(link, last, added)
        return Chain(keys + behind if behind else keys, run, block_size, length, hasher, extra)

    def _keep(self, link: Link | None, last: Link, added: list[Link]) -> None:
        """Keep the links that were added to `link`, of which the deepest is `last`."""
        links = self._memo.links
        used = link.used if link is not None else links.written
        for each in added:
            each.used = used
        # A piece goes before what it follows, or soon behind it, so whoever is kept has all that it stands on.
        path: list[bytes] = []
        if links.written - used > links.limit // _USED_AGAIN:
            for each in last.path():
                each.used = links.written  # others will go on from here, too
                path.append(each.key)
        elif not added:
            return
        links.put_all([(each.key, each, each.weight) for each in reversed(added)], path)

    def _units(self, first: int) -> list[Units]:
        """What the pieces from `first` on are for the hasher."""
        pieces = self.pieces[first:]
        if self._encode is None:
            units: list[Units] = list(pieces)  # type: ignore[arg-type]
        else:
            units = self._encoded(pieces, self.digests[first:])  # type: ignore[arg-type]
        if units and first == 0 and self._before:
            units[0] = self._before + units[0]  # type: ignore[operator]
        if units and self._after:
            units[-1] = units[-1] + self._after
        return units

    def _encoded(self, pieces: Sequence[str], digests: Sequence[bytes]) -> list[Units]:
        assert self._encode is not None
        kept = self._memo.ids
        units: list[Units] = []
        missing = []
        for i, digest in enumerate(digests):
            ids = kept.get(self._tokenizer + digest) if self._keeps(pieces[i]) else None
            if ids is None:
                missing.append(i)
                ids = _NOTHING
            units.append(ids)
        if missing:
            fresh = self._encode([pieces[i] for i in missing])
            entries = []
            for i, ids in zip(missing, fresh, strict=True):
                units[i] = ids
                if self._keeps(pieces[i]):
                    entries.append((self._tokenizer + digests[i], ids, 80 + 4 * len(ids)))
            if entries:
                kept.put_all(entries)
        return units

    def _keeps(self, piece: str) -> bool:
        return not MIN_PIECE <= len(piece) < self._least


def seed(*what: object) -> bytes:
    """Where rows begin that have nothing in common with those of other seeds."""
    return xxh3_128_digest(repr(what).encode("utf-8", "surrogatepass"))


def _view(hasher: Links, block_size: int, extra: Extra) -> bytes:
    """Tells what was hashed in one way from what was hashed in another."""
    # Salts are the clients' own: thousands of long ones are nothing to hold on to.
    new = extra.cache_salt is not None and len(extra.cache_salt) > _LONGEST_SALT
    return (_new_view if new else _known_view)(hasher, block_size, extra)


def _new_view(hasher: Links, block_size: int, extra: Extra) -> bytes:
    return seed(type(hasher).__name__, getattr(hasher, "algorithm", ""), hasher.none_hash, block_size, extra)


_known_view = lru_cache(maxsize=4096)(_new_view)


def ids_in_pieces(ids: Sequence[int]) -> list[Piece]:
    """Token ids in pieces of IDS_IN_PIECE."""
    whole = array("i", ids)
    return [whole[i : i + IDS_IN_PIECE] for i in range(0, len(whole), IDS_IN_PIECE)] or [whole]


def settled_in(pieces: Sequence[str], length: int, longest_mark: int) -> tuple[int, str]:
    """Of pieces whose first `length` characters stay however the text goes on: how many stay as they are, and the text
    behind these, as far as it stays."""
    count, end = 0, 0
    for piece in pieces[:-1]:
        # Cut before a mark, which must stay too.
        if end + len(piece) + longest_mark > length:
            break
        end += len(piece)
        count += 1
    return count, "".join(pieces[count:])[: length - end]
