"""What the next step computes: admission, budget, reuse, preemption.

The rules are those of vLLM v1/core/sched/scheduler.py and kv_cache_manager.py:

- running sequences first, in the order in which they were admitted, then the waiting line;
- a step computes at most ``max_num_batched_tokens``; a prompt that does not fit is computed in chunks;
- a running sequence that finds no block preempts the one admitted last, which loses all its blocks, goes to the front
  of the line and is computed again; nobody is admitted in such a step;
- a prompt is looked up in the pool when it is admitted, never its last token; it is admitted only if all of it fits
  into the free blocks, else nobody behind it is admitted either;
- full blocks are registered when they are scheduled, before they are computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fake_backend.connector import Connector
from fake_backend.pool import BlockPool
from fake_backend.request import Request, State
from fake_backend.timing import Load
from fake_backend.waiting import FirstComeLine, PriorityLine, WaitingLine


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Names and meanings as in vLLM's config/scheduler.py."""

    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True
    reserve_full_prompt: bool = True
    watermark: float = 0.0
    policy: str = "fcfs"
    max_loras: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling policy must be fcfs or priority, got {self.policy!r}")
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than max_model_len "
                f"({self.max_model_len}). This effectively limits the maximum sequence length to "
                "max_num_batched_tokens and makes vLLM reject longer sequences. Please increase "
                "max_num_batched_tokens or decrease max_model_len."
            )


@dataclass(slots=True)
class Counters:
    """Totals since the start; tokens unless said otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    preemptions: int = 0
    """Times."""


@dataclass(slots=True)
class Batch:
    """One step: who is computed, and how many tokens of each."""

    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    load: Load = field(default_factory=Load)
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    """Requests that ended because the KV they waited for did not come."""

    def __bool__(self) -> bool:
        return bool(self.requests)


class Scheduler:
    """Holds every request from its arrival until it is finished."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, connector: Connector | None = None) -> None:
        self.config = config
        self.pool = pool
        self.connector = connector
        self.counters = Counters()
        self.running: list[Request] = []
        self.waiting: WaitingLine = PriorityLine() if config.policy == "priority" else FirstComeLine()
        self.deferred: list[Request] = []
        """Passed over for a reason that is not the engine's capacity: KV under way, or too many LoRAs."""
        self.paused = False
        """Admit nobody new; running sequences go on."""
        self._watermark_blocks = int(config.watermark * pool.num_blocks)

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting) + len(self.deferred)

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.deferred
        yield from self.waiting

    def add(self, request: Request) -> None:
        """Put an arrival in line."""
        self.waiting.add(request)

    def schedule(self, now: float) -> Batch:
        """Decide the next step. The caller lets its time pass and then calls :meth:`complete`."""
        batch = Batch()
        if self.connector is not None:
            self._collect(self.connector, batch, now)
        budget = self._schedule_running(batch)
        if not batch.preempted and budget > 0:
            self._schedule_waiting(batch, budget, now)
        batch.load = _load(batch)
        return batch

    def complete(self, batch: Batch, now: float) -> tuple[list[Request], list[Request]]:
        """The step has been computed: (sequences that got a token, those of them that are finished)."""
        advanced: list[Request] = []
        finished: list[Request] = []
        for request in batch.requests:
            if request.state is not State.RUNNING or request.computed < request.prompt_tokens + request.generated:
                continue
            request.generated += 1
            if request.first_token is None:
                request.first_token = now
            request.last_token = now
            advanced.append(request)
            if request.generated >= request.answer_tokens:
                finished.append(request)
        for request in finished:
            self.finish(request, request.ends_with, now)
        return advanced, finished

    def finish(self, request: Request, reason: str, now: float) -> None:
        """End a request wherever it is, and give its blocks back."""
        if request.state is State.FINISHED:
            return
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif not self.waiting.remove(request):
            self.deferred.remove(request)
        request.state = State.FINISHED
        request.finish_reason = reason
        request.finished = now
        if self.connector is not None and self.connector.finished(request, now):
            return
        self.pool.release(request.blocks)
        request.blocks = []

    def preempt_all(self) -> None:
        """Send every running sequence back into line, the last admitted first."""
        while self.running:
            self._preempt(self.running.pop())

    def _collect(self, connector: Connector, batch: Batch, now: float) -> None:
        for blocks in connector.released(now):
            self.pool.release(blocks)
        for fetched in connector.arrived(now):
            request = fetched.request
            if request.state is not State.FETCHING:
                continue
            request.state = State.WAITING
            if fetched.failed:
                self.finish(request, "error", now)
                batch.failed.append(request)
                continue
            request.computed = min(fetched.tokens, request.tokens - 1)
            self.pool.register(request, min(fetched.tokens, request.tokens) // self.config.block_size)

    def _schedule_running(self, batch: Batch) -> int:
        """Returns what is left of the step's token budget."""
        block_size = self.config.block_size
        budget = self.config.max_num_batched_tokens
        threshold = self._long_prefill_threshold()
        running = self.running
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            new = min(request.prompt_tokens + request.generated - request.computed, budget)
            if 0 < threshold < new:
                new = threshold
            if request.computed + new > len(request.blocks) * block_size:
                if not self._make_room(request, new, batch):
                    break
                if batch.preempted:
                    # Under the priority policy one that stood earlier in the list may have gone.
                    index = running.index(request)
                    budget = self.config.max_num_batched_tokens - sum(batch.tokens)
            self._commit(batch, request, new)
            budget -= new
            index += 1
        return budget

    def _make_room(self, request: Request, new: int, batch: Batch) -> bool:
        """Give a running sequence the blocks for ``new`` more tokens; False if it had to go itself."""
        wanted = -(-(request.computed + new) // self.config.block_size) - len(request.blocks)
        while wanted > self.pool.free_blocks:
            if self.config.policy == "priority":
                victim = max(self.running, key=lambda other: (other.priority, other.arrival))
                self.running.remove(victim)
                if victim in batch.requests:
                    place = batch.requests.index(victim)
                    del batch.requests[place], batch.tokens[place]
            else:
                victim = self.running.pop()
            self._preempt(victim)
            batch.preempted.append(victim)
            if victim is request:
                return False
        request.blocks += self.pool.allocate(wanted)
        return True

    def _preempt(self, victim: Request) -> None:
        self.pool.release(victim.blocks)
        victim.blocks = []
        victim.computed = 0
        victim.registered = 0
        victim.state = State.PREEMPTED
        victim.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.put_back(victim)

    def _schedule_waiting(self, batch: Batch, budget: int, now: float) -> None:
        threshold = self._long_prefill_threshold()
        loras = {request.lora for request in batch.requests if request.lora is not None}
        still_deferred: list[Request] = []
        deferred, self.deferred = self.deferred, []
        stopped = False
        while budget > 0 and len(self.running) < self.config.max_num_seqs and not stopped:
            if deferred:
                request = deferred.pop(0)
            elif len(self.waiting) and not self.paused:
                request = self.waiting.pop()
            else:
                break
            blocked = request.state is State.FETCHING or (
                request.lora is not None
                and self.config.max_loras is not None
                and len(loras) >= self.config.max_loras
                and request.lora not in loras
            )
            if blocked:
                still_deferred.append(request)
                continue
            new = self._admit(request, budget, threshold, now)
            if new is None:
                stopped = True
                if request.blocks:
                    still_deferred.append(request)
                else:
                    self.waiting.put_back(request)
            elif new == 0:
                still_deferred.append(request)
            else:
                self._commit(batch, request, new)
                budget -= new
                if request.lora is not None:
                    loras.add(request.lora)
        self.deferred = still_deferred + deferred

    def _admit(self, request: Request, budget: int, threshold: int, now: float) -> int | None:
        """Try to start a waiting request: tokens to compute, 0 if it has to wait for KV, None if it doesn't fit."""
        block_size = self.config.block_size
        total = request.prompt_tokens + request.generated
        hit: list[int] = []
        external = 0
        looked_up = request.computed == 0 and not request.blocks
        local = request.computed
        if looked_up:
            if request.reads_cache:
                hit = self.pool.lookup(request.keys, (total - 1) // block_size)
            local = len(hit) * block_size
            if self.connector is not None and request.reads_cache:
                external = self.connector.match(request, local)
        held = len(request.blocks) + len(hit)
        computed = local + external
        waits = external > 0
        new = 0 if waits and self.connector is not None else total - computed
        if 0 < threshold < new:
            new = threshold
        if new > budget:
            if not self.config.chunked_prefill:
                return None
            new = budget
        free = self.pool.free_blocks - self.pool.evictable(hit)
        watermark = self._watermark_blocks if self.running else 0
        end = total if self.config.reserve_full_prompt else computed + new
        if -(-end // block_size) - held + watermark > free:
            return None
        self.pool.touch(hit)
        if looked_up:
            request.registered = len(hit)
        request.blocks = request.blocks + hit
        request.blocks += self.pool.allocate(-(-(computed + new) // block_size) - len(request.blocks))
        self._count_lookup(request, looked_up, total, local, external)
        if waits and self.connector is not None:
            self.connector.start(request, local, external, now)
            request.computed = local
            request.state = State.FETCHING
            return 0
        request.computed = computed
        request.state = State.RUNNING
        if request.first_scheduled is None:
            request.first_scheduled = now
        self.running.append(request)
        return new

    def _count_lookup(self, request: Request, looked_up: bool, total: int, local: int, external: int) -> None:
        """The prefix cache's counters leave out readmissions and requests that may not read the cache."""
        if request.cached_tokens is None:
            request.cached_tokens = local + external
            request.external_tokens = external
        if not looked_up or request.preemptions or not request.reads_cache or not self.pool.caching:
            return
        self.counters.prefix_queries += total
        self.counters.prefix_hits += local
        if self.connector is not None:
            self.counters.external_queries += total - local
            self.counters.external_hits += external

    def _long_prefill_threshold(self) -> int:
        """A cap on one sequence's share of a step, which only matters when it is not alone."""
        threshold = self.config.long_prefill_token_threshold
        return threshold if threshold and len(self) > 1 else 0

    def _commit(self, batch: Batch, request: Request, new: int) -> None:
        """Put a request into the step: its tokens count as computed, and the blocks they fill can be found at once."""
        request.computed += new
        full = request.computed // self.config.block_size
        if full > request.registered:
            self.pool.register(request, full)
        batch.requests.append(request)
        batch.tokens.append(new)


def _load(batch: Batch) -> Load:
    prefill_tokens = prefill_context = decodes = decode_context = 0
    pairs = 0.0
    for request, new in zip(batch.requests, batch.tokens, strict=True):
        end = request.computed
        if new == 1 and request.generated:
            decodes += 1
            decode_context += end
        else:
            prefill_tokens += new
            prefill_context += end
            pairs += new * (end - new / 2)
    return Load(prefill_tokens, pairs, prefill_context, decodes, decode_context)
