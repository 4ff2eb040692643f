"""What does a request's prompt look like to each engine? Its tokens, and its blocks as each replica hashes them.

Short prompts are read at once. Long ones are read in a thread, so that no stream waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from router.prompt.blocks import NO_EXTRA, Chain, Extra
from router.prompt.hashing import Hashing
from router.prompt.reader import PromptError, Reader
from router.prompt.request import Ask, Beginning, prompted, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.fleet.discovery import Fleet
    from router.fleet.replica import Replica
    from router.prompt.blocks import ByteHasher, Hasher
    from router.prompt.memo import Row
    from router.prompt.readers import Readers

log = logging.getLogger("warmroute.reading")

# What is new in a body, above this, is read in a thread: 100,000 new tokens take as long as hundreds of stream chunks.
READ_ASIDE_BYTES: Final = 32 * 1024
# Answers are taken to be this long where the request sets no bound.
USUAL_ANSWER_TOKENS: Final = 256
# More answers than this to one prompt are an engine's to refuse; they are not to distort the books meanwhile.
MAX_N: Final = 128
# Routes that generate text though their prompts are not read; of what others do, only the body's size is known.
GENERATING: Final = ("/responses", "/messages", "/generate")
USUAL_PROMPT_TOKENS: Final = 4096
# What a prompt that could not be read is taken to weigh, in bytes of body per token.
BODY_BYTES_PER_TOKEN: Final = 4
# So many tokens are taken to fit any model.
ANY_MODELS_TOKENS: Final = 512
_NO_ROWS: Final[list[Row]] = []
T = TypeVar("T")

Looked: TypeAlias = tuple[Beginning | None, int]
"""What is known of a body by its beginning, and how many of its bytes are new."""


class View:
    """A request's prompts in blocks, as replicas of one kind hash them."""

    __slots__ = ("block_size", "chains", "extra", "hashing")

    def __init__(self, block_size: int, hashing: Hashing, extra: Extra, chains: list[Chain]) -> None:
        self.block_size = block_size
        self.hashing = hashing
        self.extra = extra
        self.chains = chains


class Prompt:
    """What was read of a request. `prompts` and `views` are empty where only load can guide its routing."""

    __slots__ = ("answer_tokens", "ask", "prompts", "reader", "tokens", "unread", "views")

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.reader: Reader | None = None
        self.prompts: list[Row] = []
        self.tokens: list[int] = []
        """The length of each prompt, in tokens."""
        self.unread: str | None = None
        """Why only load can guide its routing, if so."""
        self.answer_tokens = 0
        """What is expected to be generated."""
        self.views: list[View] = []
        """The prompts' blocks, for each way in which replicas hash them: mostly one."""

    def settle(self) -> None:
        """Its answer has begun, and it is not read again: what that would take goes, since answers may take hours."""
        self.prompts = _NO_ROWS
        self.ask.settle()

    @property
    def sequences(self) -> int:
        """How many sequences the request is to an engine: one for each prompt and answer."""
        return max(1, len(self.prompts)) * min(self.ask.n, MAX_N)


class Reading:
    """Reads prompts for a fleet, each as the engines will see it."""

    def __init__(self, fleet: Fleet, readers: Readers, hash_seed: str | None) -> None:
        self._fleet = fleet
        self._readers = readers
        self._hash_seed = hash_seed
        self._hashers: dict[tuple[bool, str, str | None], Hasher | ByteHasher] = {}
        self._likely: dict[str, Hashing] = {}
        self._surprises: set[str] = set()
        # One for a prompt that takes long, one for those behind it. With more, the event loop would wait for its turn
        # among all of them.
        self._threads = ThreadPoolExecutor(2, "read")

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """Do work over so many new bytes: at once if it is short, else in a thread."""
        if size <= READ_ASIDE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads that read long prompts."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def look(self, path: str, body: bytes) -> Looked:
        """What is known of a request before it is read."""
        beginning = self._readers.beginning(path, body)
        known = beginning.known if beginning is not None else None
        return beginning, len(body) - (known.end if known is not None else 0)

    def at_once(self, path: str, body: bytes, looked: Looked) -> Ask | None:
        """What a request asks for, if little enough of it is new to be read at once."""
        beginning, size = looked
        return read(path, body, beginning) if size <= READ_ASIDE_BYTES else None

    async def ask(self, path: str, body: bytes, looked: Looked | None = None) -> tuple[Ask, int]:
        """What a request asks for, and how many bytes of its body are new."""
        beginning, size = looked or self.look(path, body)
        return await self.aside(size, lambda: read(path, body, beginning)), size

    def prompt(self, ask: Ask, path: str, body_bytes: int) -> Prompt:
        """The prompts of a request and their blocks. What cannot be read is routed by load, never refused: the engine
        is the judge of bodies."""
        prompt = self.rows(ask, path, body_bytes)
        self.blocks(prompt, body_bytes)
        return prompt

    def rows(self, ask: Ask, path: str, body_bytes: int) -> Prompt:
        """The prompts of a request, without their blocks yet."""
        prompt = Prompt(ask)
        if ask.kind != "other" or path.endswith(GENERATING):
            prompt.answer_tokens = min(ask.max_tokens or USUAL_ANSWER_TOKENS, USUAL_ANSWER_TOKENS) * min(ask.n, MAX_N)
        if ask.kind == "other":
            why = "its prompt cannot be read" if prompted(path) else "its route has no prompt"
            self._unread(prompt, body_bytes, why)
            return prompt
        replicas = self._fleet.able(ask.model)
        if not replicas:
            self._unread(prompt, body_bytes, "no replica serves its model")
            return prompt
        prompt.reader = self._readers[self._base(replicas[0], ask.model)]
        try:
            prompt.prompts = prompt.reader.rows(ask)
        except Exception as error:
            self._failed(prompt, body_bytes, error)
        return prompt

    def blocks(self, prompt: Prompt, body_bytes: int) -> None:
        """Their blocks and lengths, where they could be read."""
        reader = prompt.reader
        if reader is None or prompt.unread is not None:
            return
        try:
            for replica in self._fleet.able(prompt.ask.model):
                self.chains(prompt, replica)
            per_token = reader.units_per_token
            prompt.tokens = [len(each) // per_token for each in prompt.prompts]
        except Exception as error:
            self._failed(prompt, body_bytes, error)

    def _failed(self, prompt: Prompt, body_bytes: int, error: Exception) -> None:
        """Whatever a client managed to break here, its request still goes through."""
        if isinstance(error, PromptError):
            self._unread(prompt, body_bytes, "its prompt cannot be read")
            return
        if (kind := type(error).__name__) not in self._surprises:
            self._surprises.add(kind)
            log.error("a prompt could not be read; the next ones that fail like this are only counted", exc_info=error)
        self._unread(prompt, body_bytes, "reading its prompt failed")

    def _unread(self, prompt: Prompt, body_bytes: int, why: str) -> None:
        prompt.unread = why
        if prompt.reader is not None:
            prompt.prompts, prompt.views = [], []
        tokens = body_bytes // BODY_BYTES_PER_TOKEN
        prompt.tokens = [tokens if tokens <= ANY_MODELS_TOKENS else min(tokens, self._longest(prompt.ask.model))]

    def _longest(self, model: str | None) -> int:
        """The longest prompt that a model takes, in tokens: images and uploads are not as long as their bodies."""
        lengths = [
            card.max_model_len
            for replica in self._fleet.able(model)
            for card in replica.models.values()
            if card.max_model_len is not None and (model is None or model == card.id)
        ]
        return max(lengths, default=USUAL_PROMPT_TOKENS)

    def chains(self, prompt: Prompt, replica: Replica) -> list[Chain]:
        """The prompts' blocks as this replica hashes them; computed once for each way of hashing."""
        reader = prompt.reader
        if reader is None or prompt.unread is not None:
            return []
        extra = self._extra(replica, prompt.ask)
        hashing = replica.hashing or self._likely_hashing(replica.algorithm)
        if extra is not NO_EXTRA and not hashing.tagged:
            extra = extra.untagged()
        for view in prompt.views:
            if (
                view.block_size == replica.block_size
                and (view.hashing is hashing or not reader.exact or view.hashing == hashing)
                and (view.extra is extra or view.extra == extra)
            ):
                return view.chains
        if not prompt.prompts:
            return []  # an answer has begun, and meanwhile it has turned out that the replica hashes in another way
        hasher = self._hasher(reader, hashing)
        size = reader.block_tokens(replica.block_size)
        chains = [each.chain(hasher, size, extra) for each in prompt.prompts]
        prompt.views.append(View(replica.block_size, hashing, extra, chains))
        return chains

    def _likely_hashing(self, algorithm: str) -> Hashing:
        """How a replica is likely to name its blocks whose KV events do not prove it."""
        found = self._likely.get(algorithm)
        if found is None:
            found = self._likely[algorithm] = Hashing(algorithm, self._hash_seed)
        return found

    def _hasher(self, reader: Reader, hashing: Hashing) -> Hasher | ByteHasher:
        key = (reader.exact, hashing.algorithm, hashing.seed)
        hasher = self._hashers.get(key)
        if hasher is None:
            hasher = self._hashers[key] = reader.hasher(hashing.algorithm, hashing.seed)
        return hasher

    @staticmethod
    def _base(replica: Replica, model: str | None) -> str:
        """The base model that a name stands for at a replica."""
        card = replica.models.get(model) if model is not None else next(iter(replica.models.values()), None)
        if card is None:
            return model or ""
        return card.parent or card.id

    @staticmethod
    def _extra(replica: Replica, ask: Ask) -> Extra:
        card = replica.models.get(ask.model) if ask.model is not None else None
        if card is not None and card.parent is not None:
            return Extra(lora_name=card.id, lora_path=card.root, cache_salt=ask.cache_salt)
        return Extra(cache_salt=ask.cache_salt) if ask.cache_salt else NO_EXTRA
