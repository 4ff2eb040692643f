"""One replica put together: tokenizer, engines, answers, metrics; and how a prompt becomes sequences in an engine."""

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from fake_backend import budget, errors
from fake_backend.answers import Answers, Wish
from fake_backend.cache_labels import cache_config
from fake_backend.clock import Clock
from fake_backend.engine import Engine
from fake_backend.faults import Faults
from fake_backend.kv_events import MAP_ENCODING_SINCE, Content, Encoding
from fake_backend.metrics import LoraSeries, Metrics
from fake_backend.naming import Namer
from fake_backend.nixl import NixlSeries
from fake_backend.rank import Rank
from fake_backend.request import Request
from fake_backend.runtime import Signal, Ticket
from fake_backend.scheduler import SchedulerConfig
from fake_backend.settings import LoraModule, Settings
from fake_backend.timing import StepTime, roofline
from fake_backend.wire import Request as HttpRequest
from router.prompt.blocks import NO_EXTRA, Extra
from router.prompt.reader import Reader
from router.prompt.tokens import Tokenizer

log = logging.getLogger("fake_backend")


@dataclass(slots=True)
class Job:
    """What an endpoint wants generated for one prompt."""

    id: str
    prompt_ids: list[int]
    wish: Wish
    lora: LoraModule | None = None
    cache_salt: str | None = None
    priority: int = 0
    reads_cache: bool = True
    n: int = 1
    session_id: str | None = None
    rank: int | None = None
    """The data-parallel rank that was asked for."""
    transfer: Mapping[str, Any] | None = None
    signal: Signal = field(default_factory=Signal)
    """Shared by the jobs of one exchange."""
    tickets: list[Ticket] = field(default_factory=list)


def step_time(settings: Settings) -> StepTime:
    """The roofline of the settings' model and GPU."""
    demand, model, gpu = settings.demand, settings.model, settings.gpu
    form = budget.quantization(model, demand.quantization)
    return roofline(
        parameters=model.parameters,
        active_parameters=model.active,
        weight_bytes=model.parameters * budget.WEIGHT_BYTES[form],
        attention_layers=model.kv_layers,
        query_heads=model.query_heads,
        head_size=model.head_size,
        kv_bytes_per_token=budget.kv_bytes_per_token(model, demand.kv_dtype, 1),
        flops=budget.arithmetic(demand),
        bandwidth=gpu.bandwidth,
        compute_efficiency=gpu.compute_efficiency,
        bandwidth_efficiency=gpu.bandwidth_efficiency,
        devices=demand.tensor_parallel,
        layers=model.layers,
        interconnect=gpu.interconnect,
        overhead=settings.step_overhead,
    )


def scheduler_config(settings: Settings) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        chunked_prefill=settings.chunked_prefill,
        reserve_full_prompt=settings.reserve_full_prompt,
        policy=settings.policy,
        max_loras=settings.max_loras if settings.enable_lora else None,
    )


class Replica:
    """What the endpoints work with."""

    def __init__(self, settings: Settings, faults: Faults) -> None:
        self.settings = settings
        self.faults = faults
        version = tuple(int(part) for part in settings.vllm_version.split(".")[:2])
        whole = os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") == "0"
        self._encoding = Encoding(settings.block_size, whole, version >= MAP_ENCODING_SINCE)
        self.tokenizer = Tokenizer.load(settings.tokenizer)
        self.reader = Reader(self.tokenizer, trust_request_chat_template=True)
        self.answers = Answers(self.tokenizer, settings.style, settings.seed)
        self.on_death: Callable[[], None] | None = None
        self._vocabulary: tokenizers.Tokenizer | None = None
        self.in_server = 0
        """Requests inside the HTTP server, for /load."""
        self._make_ranks()

    def _make_ranks(self) -> None:
        """Fresh engines with empty caches, counters at zero, and hashes as a new process would seed them."""
        settings = self.settings
        self.clock = Clock(settings.time_scale)
        self.namer = Namer(settings.hash_algorithm, settings.block_size)
        self.fingerprint = f"vllm-{settings.vllm_version}-{secrets.token_hex(4)}"
        self.created = int(time.time())
        self.sleeping = self.paused = self.dead = False
        self.loras: dict[str, LoraModule] = {}
        self.lora_ids: dict[str, int] = {}
        for module in settings.loras:
            self.add_lora(module)
        config, time_of_step = scheduler_config(settings), step_time(settings)
        self.ranks = [
            Rank(number, settings, config, time_of_step, self.clock, self._encoding, self.faults)
            for number in range(settings.data_parallel)
        ]
        self.metrics = Metrics(settings.served_names[0], settings.max_model_len, self.engines, cache_config(settings))
        for rank, series in zip(self.ranks, self.metrics.ranks, strict=True):
            rank.count = series.observe
            rank.runtime.on_death = self._died
            if settings.offloading_gib is not None:
                series.external_source = "host"
        if settings.enable_lora:
            self.metrics.registry.register(LoraSeries(settings.max_loras, self.engines))
        connectors = [rank.nixl for rank in self.ranks if rank.nixl is not None]
        if connectors:
            self.metrics.registry.register(NixlSeries(settings.served_names[0], connectors))

    @property
    def engines(self) -> list[Engine]:
        return [rank.engine for rank in self.ranks]

    def _died(self) -> None:
        self.dead = True
        if self.on_death is not None:
            self.on_death()

    def failure(self) -> errors.ApiError:
        """What is told of a request that ended in an error."""
        return errors.engine_dead() if self.dead else errors.engine_failure()

    async def start(self) -> None:
        """Run the engines, publish their events, listen for peers. Raises OSError where an endpoint can't be had."""
        for rank in self.ranks:
            await rank.open()

    async def stop(self) -> None:
        for rank in self.ranks:
            await rank.close()

    async def restart(self) -> None:
        """As if the process had been replaced: caches, counters, clocks and identities are new."""
        await self.stop()
        self._make_ranks()
        self.metrics.process.started = time.time()
        await self.start()

    def add_lora(self, module: LoraModule) -> None:
        """An adapter loaded again keeps its number."""
        self.loras[module.name] = module
        self.lora_ids.setdefault(module.name, len(self.lora_ids) + 1)

    def refused(self, request: HttpRequest) -> None:
        """A request was answered with an error before it reached an engine: let a prefill replica free its blocks."""
        if self.settings.kv_transfer is None or b"do_remote_prefill" not in request.body:
            return
        with suppress(ValueError, RecursionError):
            params = json.loads(request.body).get("kv_transfer_params")
            if isinstance(params, dict):
                self.ranks[0].refused(params)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them (``\u0120sea``), not as text."""
        if self._vocabulary is None:
            self._vocabulary = tokenizers.Tokenizer.from_file(str(self.settings.tokenizer / "tokenizer.json"))
        return [self._vocabulary.id_to_token(token) or "" for token in ids]

    def transfer_params(self, ticket: Ticket) -> Mapping[str, Any] | None:
        """What a prefill replica hands back for the decode replica; None without a KV connector."""
        return next(rank for rank in self.ranks if rank.runtime is ticket.runtime).transfer_params(ticket)

    def event_sources(self) -> dict[str, Any]:
        """Where KV events can be subscribed to, by data-parallel rank."""
        return {str(rank.number): rank.publisher.config for rank in self.ranks if rank.publisher is not None}

    def model_names(self) -> list[str]:
        return [*self.settings.served_names, *self.loras]

    def adapter(self, model: str | None) -> LoraModule | None:
        """The adapter that a model name means, None for the base model. Raises ApiError 404 for an unknown name."""
        if not model or model in self.settings.served_names:
            return None
        if model in self.loras:
            return self.loras[model]
        raise errors.unknown_model(model, self.model_names())

    def check_prompt(self, ids: list[int], *, text: bool) -> None:
        """Raises ApiError for a prompt that the engine would refuse; ``text``: it was tokenized here."""
        limit = self.settings.max_model_len
        if not ids:
            message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            raise errors.ApiError(400, message, param="prompt")
        if len(ids) > limit:
            # vLLM stops tokenizing a text one token past the limit, so it knows no more than that.
            raise errors.too_long(limit, limit + 1 if text else len(ids), at_least=text or len(ids) == limit + 1)
        if len(ids) == limit:
            raise errors.no_room(limit)
        top = max(ids)
        if top >= self.tokenizer.vocab_size:
            raise errors.ApiError(400, f"Token id {top} is out of vocabulary")

    def check_rank(self, rank: int | None) -> None:
        if rank is not None and not 0 <= rank < len(self.engines):
            raise errors.ApiError(400, f"data_parallel_rank {rank} is out of range [0, {len(self.engines)}).")

    def admit(self, sequences: int) -> None:
        """The queue limits of vLLM's front end (v1/engine/async_llm.py). Raises ApiError 503."""
        settings = self.settings
        if settings.max_num_queued_reqs is not None:
            present = sum(len(engine.scheduler) for engine in self.engines)
            if present + sequences > settings.max_num_queued_reqs:
                self.metrics.rejected("max_num_queued_reqs")
                raise errors.queue_full()
        if settings.max_num_queued_tokens is not None:
            queued = sum(engine.queued_prompt_tokens for engine in self.engines)
            if queued >= settings.max_num_queued_tokens:
                self.metrics.rejected("max_num_queued_tokens")
                raise errors.backlog_full()

    def submit(self, job: Job) -> list[Ticket]:
        """Start a job: its tickets, one per answer. Raises ApiError 500 when the engine is dead."""
        if self.dead:
            raise errors.engine_dead()
        rank = min(self.ranks, key=lambda rank: rank.load) if job.rank is None else self.ranks[job.rank]
        extra = NO_EXTRA
        if job.lora is not None or job.cache_salt:
            lora_name, lora_path = (job.lora.name, job.lora.path) if job.lora else (None, None)
            extra = Extra(lora_name, lora_path, job.cache_salt)
        for index in range(job.n):
            answer = self.answers.make(job.prompt_ids, job.wish, index)
            names = self.namer.names(job.prompt_ids + answer.ids, extra)
            content = Content(
                job.prompt_ids + answer.ids,
                names.digests,
                lora_name=extra.lora_name,
                lora_id=self.lora_ids.get(extra.lora_name) if extra.lora_name else None,
                cache_salt=job.cache_salt,
                session_id=job.session_id,
            )
            request = Request(
                id=f"{job.id}-{index}-{secrets.token_hex(4)}" if job.n > 1 else f"{job.id}-{secrets.token_hex(4)}",
                prompt_tokens=len(job.prompt_ids),
                answer_tokens=len(answer.ids),
                keys=names.keys,
                arrival=rank.runtime.now(),
                ends_with=answer.reason,
                max_tokens=job.wish.max_tokens,
                priority=job.priority,
                lora=job.lora.name if job.lora else None,
                reads_cache=job.reads_cache,
                transfer=job.transfer,
            )
            ticket = Ticket(request, answer, job.prompt_ids, job.signal, content)
            job.tickets.append(ticket)
            rank.runtime.submit(ticket)
        return job.tickets

    def abandon(self, jobs: Iterable[Job]) -> None:
        """The client has left: stop working on what is not done."""
        for job in jobs:
            for ticket in job.tickets:
                if not ticket.done:
                    log.info("aborted %s after %d tokens", ticket.request.id, ticket.request.generated)
                    ticket.abandon()
