"""One request's way through the router, in the order in which it happens.

    read    what does the prompt look like to the engine?             router.prompt
    match   which replica holds how much of it?                       router.index
    choose  where is it answered soonest? Book it there at once,      router.choose
            so that a burst spreads
    send    pass it on, pass the answer back, another replica if      router.wire
            the first one fails before its first byte
    learn   what is cached there now, and how fast was it?            router.choose

With a shared store, what other routers know is asked for before that, once. Between match and booking nothing is
awaited: no other request can slip in and see a load that is about to change.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from router.choose.explanation import Explanation
from router.fleet.replica import SHUN_SECONDS
from router.prompt.blocks import NO_EXTRA, Chain, Extra
from router.prompt.hashing import Hashing
from router.prompt.reader import PromptError, Reader
from router.prompt.request import Ask, read, without_hand_off
from router.wire import errors
from router.wire.attempts import Attempt, Ending, Outcome, Patience
from router.wire.stream import Answer, EventWatch, FirstEvent, JsonWatch, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from router.choose.dispatch import Dispatch, Placement
    from router.fleet.discovery import Fleet
    from router.fleet.replica import Replica
    from router.index.feedback import Change, Feedback
    from router.index.shared import Shared
    from router.index.shared_codec import Outside
    from router.prompt.blocks import ByteHasher, Hasher
    from router.prompt.memo import Row
    from router.prompt.readers import Readers
    from router.telemetry import Telemetry
    from router.wire.errors import Refusal
    from router.wire.front import Front
    from router.wire.http import Head, Headers, Request
    from router.wire.upstream import Pool

log = logging.getLogger("warmroute.journey")

# What is new in a body, above this, is read in a thread: 100,000 new tokens take as long as hundreds of stream chunks.
READ_ASIDE_BYTES = 32 * 1024
# Answers are taken to be this long where the request sets no bound.
USUAL_ANSWER_TOKENS = 256
# More answers than this to one prompt are an engine's to refuse; they are not to distort the books meanwhile.
MAX_N = 128
# Routes that generate text though their prompts are not read; of what others do, only the body's size is known.
GENERATING = ("/responses", "/messages", "/generate")
USUAL_PROMPT_TOKENS = 4096
# What a prompt that could not be read is taken to weigh, in bytes of body per token.
BODY_BYTES_PER_TOKEN = 4
RANK_HEADER = b"X-data-parallel-rank"
# Of a request with many prompts so many are looked up in the shared index; the others by what is known here.
MAX_ASKED = 16
T = TypeVar("T")
# What is answered with these is worth asking another replica: it is down, starting, overloaded or broken.
TRY_ELSEWHERE = frozenset({500, 502, 503, 504})


@dataclass(slots=True)
class Prompt:
    """What was read of a request. `prompts` is empty where only load can guide its routing."""

    ask: Ask
    reader: Reader | None = None
    prompts: list[Row] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """The length of each prompt, in tokens."""
    unread: str | None = None
    """Why only load can guide its routing, if so."""
    answer_tokens: int = 0
    """What is expected to be generated."""
    chains: dict[tuple[int, Hashing | None, Extra], list[Chain]] = field(default_factory=dict)
    """The prompts' blocks, for each way in which replicas hash them."""


class Journey:
    """Serves requests. One for all of them; what belongs to one request is in `Prompt` and `Leg`."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        pools: dict[str, Pool],
        readers: Readers,
        dispatch: Dispatch,
        feedback: Feedback,
        telemetry: Telemetry,
        patience: Patience,
        max_attempts: int,
        hash_seed: str | None,
        show_choice: bool,
        shared: Shared | None = None,
    ) -> None:
        self._fleet = fleet
        self._pools = pools
        self._readers = readers
        self._dispatch = dispatch
        self._feedback = feedback
        self._telemetry = telemetry
        self._patience = patience
        self._max_attempts = max_attempts
        self._hash_seed = hash_seed
        self._show_choice = show_choice
        self._shared = shared
        self._hashers: dict[tuple[bool, str, str | None], Hasher | ByteHasher] = {}
        self._surprises: set[str] = set()
        # One for a prompt that takes long, one for those behind it. With more, the event loop would wait for its turn
        # among all of them.
        self._threads = ThreadPoolExecutor(2, "read")
        self._clock: Callable[[], float] = asyncio.get_running_loop().time

    async def serve(self, request: Request, client: Front) -> None:
        """Answer one client's request. Cancelled when the client leaves."""
        begun = self._clock()
        ending, status = "failed", 500
        try:
            ending, status = await self._serve(request, client)
        except asyncio.CancelledError:
            ending, status = "left", 0
            raise
        finally:
            self._telemetry.request(ending, status)
            self._telemetry.duration.observe(self._clock() - begun)

    async def _serve(self, request: Request, client: Front) -> tuple[str, int]:
        """How it ended, and the status that the client was told."""
        body = request.body
        ask, size = Ask(), 0
        reading = perf_counter()
        if request.method == b"POST":
            ask, size = await self._ask(request.path, body)
            if ask.hand_off:
                # These steer KV transfers inside the fleet; a client's can pin blocks or kill an engine.
                body = await self._aside(len(body), lambda: without_hand_off(request.body))
        if not self._fleet.able(None):
            return self._refuse(
                client, errors.no_replica(f"none of {len(self._fleet)} is ready (GET /ready tells why)")
            )
        prompt = await self._aside(size, lambda: self._read(ask, request.path, len(body)))

        deadline = self._clock() + self._patience.first_byte
        tried: list[str] = []
        doubtful = False
        last = Outcome(Ending.UNREACHED)
        while len(tried) < self._max_attempts and self._clock() < deadline:
            outside = await self._outside(prompt, self._candidates(ask.model, tried)) if self._shared else None
            replicas = self._candidates(ask.model, tried)
            if not replicas:
                break
            leg = self._choose(prompt, replicas, _rank(request), outside)
            if not tried:
                self._telemetry.decision.observe(perf_counter() - reading)
            replica = leg.placement.replica
            tried.append(replica.name)
            # A 500, or a connection lost over it, may be this very request's doing: one more try, no tour of the fleet.
            leg.may_retry = functools.partial(self._may_retry, ask.model, tuple(tried), doubtful)
            patience = Patience(max(0.001, deadline - self._clock()), self._patience.idle)
            try:
                last = await Attempt(client, request, leg, patience, leg.added()).run(self._pools[replica.name], body)
            except asyncio.CancelledError:
                self._dispatch.left(self._clock(), leg.placement)
                raise
            finally:
                self._dispatch.end(self._clock(), leg.placement)
                self._load_changed()
            self._telemetry.replica(replica.name).attempt(last.ending.value)
            if last.ending in (Ending.COMPLETE, Ending.BROKEN):
                if last.ending is Ending.BROKEN:
                    log.debug("%s broke off an answer: %s", replica.name, last.why)
                elif last.status is not None and last.status < 300:
                    self._learn(leg)
                else:
                    self._dispatch.withdraw(self._clock(), leg.placement)
                return last.ending.value, last.status or 0
            self._dispatch.withdraw(self._clock(), leg.placement)
            if last.ending in (Ending.UNREACHED, Ending.SILENT):
                self._shun(replica, last.why)
            if last.ending is Ending.EXHAUSTED:
                return self._refuse(client, errors.no_connection_left())
            if last.begun and doubtful:
                break  # two replicas have failed over it: it may be what fails them
            doubtful = doubtful or last.begun

        if not tried:
            return self._refuse(client, errors.no_replica(f"none that is ready serves {ask.model}"))
        if last.ending is Ending.SILENT:
            return self._refuse(client, errors.first_byte_timeout(tried[-1], self._patience.first_byte))
        return self._refuse(client, errors.unreachable(tried, last.why))

    @staticmethod
    def _refuse(client: Front, refusal: Refusal) -> tuple[str, int]:
        client.refuse(refusal)
        return "refused", refusal.status

    def _may_retry(self, model: str | None, tried: tuple[str, ...], doubtful: bool, status: int) -> bool:
        """Whether an answer of this status is dropped because another replica will be asked."""
        if status not in TRY_ELSEWHERE or (status == 500 and doubtful) or len(tried) >= self._max_attempts:
            return False
        return bool(self._candidates(model, tried))

    def _shun(self, replica: Replica, why: str) -> None:
        """Prefer others for a moment. One line when it begins: a replica that stays away is the probe's to tell of."""
        now = self._clock()
        if replica.shunned_until <= now:
            log.warning("%s gave no answer: %s", replica.name, why)
        replica.shunned_until = now + SHUN_SECONDS

    async def explain(self, path: str, body: bytes) -> Explanation:
        """What would be done with a request that came now. Nothing is sent, booked or remembered."""
        ask = await self._aside(len(body), lambda: read(path, body))
        prompt = await self._aside(len(body), lambda: self._read(ask, path, len(body)))
        replicas = self._candidates(ask.model, ())
        decision = None
        if replicas:
            outside = await self._outside(prompt, replicas)
            decision = self._dispatch.weigh(
                self._clock(), replicas, lambda replica: self._chains(prompt, replica), prompt.tokens, outside
            )
        blocks = {view[0]: sum(len(chain.keys) for chain in chains) for view, chains in prompt.chains.items()}
        return Explanation(
            model=ask.model,
            kind=ask.kind,
            read_as=prompt.reader.mode if prompt.reader is not None and prompt.prompts else None,
            unread=prompt.unread,
            tokens=prompt.tokens,
            blocks=blocks,
            decision=decision,
            none_because="; ".join(self._fleet.missing()) or f"none that is ready serves {ask.model}",
            errors={
                replica.name: (record.error, record.cause)
                for replica in replicas
                if (record := self._feedback.of(replica.name))
            },
        )

    # -- read ---------------------------------------------------------------------------------------------------

    async def _aside(self, size: int, work: Callable[[], T]) -> T:
        if size <= READ_ASIDE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads that read long prompts."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, path: str, body: bytes) -> tuple[Ask, int]:
        """What a request asks for, and how many bytes of its body are new."""
        beginning = self._readers.beginning(path, body)
        known = beginning.known if beginning is not None else None
        size = len(body) - (known.end if known is not None else 0)
        return await self._aside(size, lambda: read(path, body, beginning)), size

    def _read(self, ask: Ask, path: str, body_bytes: int) -> Prompt:
        """The prompts of a request and their blocks. What cannot be read is routed by load, never refused: the engine
        is the judge of bodies."""
        prompt = Prompt(ask)
        if ask.kind != "other" or path.endswith(GENERATING):
            prompt.answer_tokens = min(ask.max_tokens or USUAL_ANSWER_TOKENS, USUAL_ANSWER_TOKENS) * min(ask.n, MAX_N)
        if ask.kind == "other":
            return self._unread(prompt, body_bytes, "its route has no prompt")
        replicas = self._fleet.able(ask.model)
        if not replicas:
            return self._unread(prompt, body_bytes, "no replica serves its model")
        prompt.reader = self._readers[self._base(replicas[0], ask.model)]
        try:
            prompt.prompts = prompt.reader.rows(ask)
            for replica in replicas:
                self._chains(prompt, replica)
            per_token = prompt.reader.units_per_token
            prompt.tokens = [len(each) // per_token for each in prompt.prompts]
        except PromptError:
            return self._unread(prompt, body_bytes, "its prompt cannot be read")
        except Exception as error:
            # Whatever a client managed to break here, its request still goes through.
            if (kind := type(error).__name__) not in self._surprises:
                self._surprises.add(kind)
                log.exception("a prompt could not be read; the next ones that fail like this are only counted")
            return self._unread(prompt, body_bytes, "reading its prompt failed")
        return prompt

    def _unread(self, prompt: Prompt, body_bytes: int, why: str) -> Prompt:
        prompt.unread = why
        prompt.prompts = []
        prompt.tokens = [min(body_bytes // BODY_BYTES_PER_TOKEN, self._longest(prompt.ask.model))]
        return prompt

    def _longest(self, model: str | None) -> int:
        """The longest prompt that a model takes, in tokens: images and uploads are not as long as their bodies."""
        lengths = [
            card.max_model_len
            for replica in self._fleet.able(model)
            for card in replica.models.values()
            if card.max_model_len is not None and (model is None or model == card.id)
        ]
        return max(lengths, default=USUAL_PROMPT_TOKENS)

    def _chains(self, prompt: Prompt, replica: Replica) -> list[Chain]:
        """The prompts' blocks as this replica hashes them; computed once for each way of hashing."""
        reader = prompt.reader
        if reader is None or not prompt.prompts:
            return []
        extra = self._extra(replica, prompt.ask)
        hashing = self._hashing(replica)
        if not hashing.tagged and extra is not NO_EXTRA:
            extra = replace(extra, tagged=False)
        view = (replica.block_size, hashing if reader.exact else None, extra)
        chains = prompt.chains.get(view)
        if chains is None:
            hasher = self._hasher(reader, hashing)
            size = reader.block_tokens(replica.block_size)
            chains = prompt.chains[view] = [each.chain(hasher, size, extra) for each in prompt.prompts]
        return chains

    def _hashing(self, replica: Replica) -> Hashing:
        """How a replica names its blocks: as its KV events prove it, else as it is likely."""
        return replica.hashing or Hashing(replica.algorithm, self._hash_seed)

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

    # -- match, choose, book ------------------------------------------------------------------------------------

    def _candidates(self, model: str | None, tried: Iterable[str]) -> list[Replica]:
        """Replicas that may be asked next: never one that was; those that just failed only where there is no other."""
        now = self._clock()
        left = [replica for replica in self._fleet.able(model) if replica.name not in tried]
        return [replica for replica in left if replica.shunned_until <= now] or left

    async def _outside(self, prompt: Prompt, replicas: list[Replica]) -> Outside | None:
        """What all routers know of this prompt and have given to the fleet; None where there is no shared store, or it
        does not answer. One question, for every way in which the prompts are hashed."""
        if self._shared is None:
            return None
        views: dict[int, tuple[list[Chain], list[str]]] = {}
        for replica in replicas:
            chains = self._chains(prompt, replica)
            views.setdefault(id(chains), (chains, []))[1].append(replica.name)
        return await self._shared.consult(
            [(chain.keys, names) for chains, names in views.values() for chain in chains[:MAX_ASKED]]
        )

    def _load_changed(self) -> None:
        if self._shared is not None:
            self._shared.load_changed()

    def _choose(self, prompt: Prompt, replicas: list[Replica], rank: int | None, outside: Outside | None) -> Leg:
        now = self._clock()
        ask = prompt.ask
        placement = self._dispatch.place(
            now,
            replicas,
            lambda replica: self._chains(prompt, replica),
            prompt.tokens,
            answer_tokens=prompt.answer_tokens,
            visible=ask.stream,
            sequences=max(1, len(prompt.prompts)) * min(ask.n, MAX_N),
            rank=rank,
            outside=outside,
        )
        self._load_changed()
        name = placement.replica.name
        if prompt.unread is not None:
            self._telemetry.unread.labels(prompt.unread).inc()
        counters, hit = self._telemetry.replica(name), placement.decision.candidate.hit
        counters.prompt_tokens.inc(sum(prompt.tokens))
        counters.predicted_tokens.inc(hit)
        self._feedback.placed(name, hit)
        return Leg(prompt, placement, self._first_token, show_choice=self._show_choice, rank_given=rank is not None)

    # -- learn --------------------------------------------------------------------------------------------------

    def _first_token(self, leg: Leg) -> None:
        """The first byte of a streamed answer: the engine is through with the prefill."""
        now, placement = self._clock(), leg.placement
        self._dispatch.first_token(now, placement)
        self._load_changed()
        self._telemetry.replica(placement.replica.name).ttft.observe(now - placement.chosen_at)

    def _learn(self, leg: Leg) -> None:
        """The answer is whole: its blocks are cached too, and the engine may have told what it had."""
        answer = leg.answer()
        if answer is None or answer.failed:
            return
        name = leg.placement.replica.name
        if answer.cached_tokens is not None:
            self._telemetry.replica(name).delivered_tokens.inc(answer.cached_tokens)
        if answer.completion_tokens is not None:
            self._telemetry.replica(name).completion_tokens.inc(answer.completion_tokens)
        ask, reader = leg.prompt.ask, leg.prompt.reader
        if reader is None or not leg.prompt.prompts:
            return
        changed = self._feedback.answered(
            name,
            exact=reader.exact and not ask.inexact,
            tokens=sum(leg.prompt.tokens),
            predicted=leg.placement.decision.candidate.hit,
            prompt_tokens=answer.prompt_tokens,
            cached=answer.cached_tokens,
        )
        if changed is not None:
            tell(changed)
        chains = self._chains(leg.prompt, leg.placement.replica)
        beyond = 0
        if len(chains) == 1 and ask.n == 1:
            (chain,) = chains
            generated = reader.answer(ask, answer.text, answer.token_ids, finish_reason=answer.finish_reason)
            if generated and not _altered(reader, answer, len(generated)):
                chains = [chain.extend(generated)]
            elif answer.completion_tokens is not None:
                # The last token is sampled, but never computed.
                computed = chain.length + (answer.completion_tokens - 1) * reader.units_per_token
                beyond = max(0, computed // chain.block_size - len(chain.keys))
        self._dispatch.answered(leg.placement, chains, beyond=beyond)


def tell(change: Change) -> None:
    """One log line for a replica whose cache routing became degraded, or healed."""
    if change.cause is None:
        log.info("%s: cache routing is sound again", change.replica)
    else:
        log.warning("%s: cache routing is degraded: %s", change.replica, change.cause)


def _altered(reader: Reader, answer: Answer, tokens: int) -> bool:
    """Whether the answer's text, tokenized again, has another length than the engine generated: then the blocks that
    the engine holds are not those of the text, and the next turn will not find them."""
    if not reader.exact or answer.token_ids is not None or answer.completion_tokens is None:
        return False
    return tokens != answer.completion_tokens - 1


def _rank(request: Request) -> int | None:
    """The data-parallel rank that the client asks for (vLLM reads X-data-parallel-rank)."""
    value = request.header(RANK_HEADER.lower())
    return int(value) if value is not None and value.isdigit() and len(value) < 6 else None


class Leg:
    """One request at one replica, as the wire sees it (an `Observer`): what to add to its answer, what that says."""

    def __init__(
        self,
        prompt: Prompt,
        placement: Placement,
        first_token: Callable[[Leg], None],
        *,
        show_choice: bool,
        rank_given: bool,
    ) -> None:
        self.prompt = prompt
        self._rank_given = rank_given
        self.placement = placement
        self.may_retry: Callable[[int], bool] = lambda _: False
        self._first_token = first_token
        self._show_choice = show_choice
        self._watch: Watch | None = None
        self._streamed = False
        self._begun = FirstEvent()
        self._clock = asyncio.get_running_loop().time

    def added(self) -> Headers:
        """Headers for the replica: the rank that was chosen, unless the client itself named one."""
        rank = self.placement.decision.candidate.rank
        return [] if rank is None or self._rank_given else [(RANK_HEADER, b"%d" % rank)]

    def retries(self, status: int) -> bool:
        return self.may_retry(status)

    def answering(self, head: Head) -> Headers:
        kind = (head.header(b"content-type") or b"").lower()
        stream = kind.startswith(b"text/event-stream")
        self._streamed = stream and head.status == 200
        if head.status == 200 and self.prompt.ask.kind != "other" and head.header(b"content-encoding") is None:
            if stream:
                self._watch = EventWatch()
            elif kind.startswith(b"application/json"):
                self._watch = JsonWatch()
        if not self._show_choice:
            return []
        return [
            (b"x-warmroute-replica", self.placement.replica.name.encode("latin-1")),
            (b"x-warmroute-predicted-tokens", b"%d" % self.placement.decision.candidate.hit),
        ]

    def feed(self, piece: bytes) -> None:
        self.placement.replica.heard_at = self._clock()
        if self._streamed and self._begun.by(piece):
            self._streamed = False
            self._first_token(self)
        if self._watch is not None:
            self._watch.feed(piece)

    def answer(self) -> Answer | None:
        return self._watch.answer() if self._watch is not None else None
