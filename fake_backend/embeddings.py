"""POST /v1/embeddings."""

import base64
import secrets
import time
from array import array
from random import Random

import xxhash

from fake_backend import completions, errors, sse, usage
from fake_backend.answers import Wish
from fake_backend.errors import JSON_HEADERS, compact
from fake_backend.replica import Job, Replica
from fake_backend.runtime import Signal
from fake_backend.validate import Fields, invalid, read_body
from fake_backend.wire import Exchange

DIMENSIONS = 64
MOST_DIMENSIONS = 8192


def vector(ids: list[int], dimensions: int) -> list[float]:
    """A unit vector that depends on the tokens alone."""
    random = Random(xxhash.xxh3_64_intdigest(repr(ids).encode()))
    values = [random.gauss(0.0, 1.0) for _ in range(dimensions)]
    norm = sum(value * value for value in values) ** 0.5
    return [value / norm for value in values]


async def handle(replica: Replica, exchange: Exchange) -> None:
    fields = Fields(read_body(exchange.request))
    fields.text("model")
    value = fields.required("input")
    form = fields.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise invalid("literal_error", "body.encoding_format", "Input should be 'float' or 'base64'", form)
    dimensions = (
        DIMENSIONS if fields.integer("dimensions") is None else fields.bounded("dimensions", 1, MOST_DIMENSIONS)
    )
    assert dimensions is not None
    lora = replica.adapter(fields.text("model"))
    if value in ("", []):
        raise errors.ApiError(400, "input must be non-empty. (parameter=input)", param="input")
    prompts = completions.read_prompts(value)
    identity = f"embd-{exchange.request.headers.get('x-request-id') or secrets.token_hex(8)}"
    signal = Signal()
    jobs: list[Job] = []
    for place, prompt in enumerate(prompts):
        ids = completions.token_ids(replica, prompt, special=True)
        replica.check_prompt(ids, text=isinstance(prompt, str))
        # A pooled prompt is one step's output without a token of its own; the engine sees it as a one-token answer.
        jobs.append(Job(f"{identity}-{place}", ids, Wish(max_tokens=1, ignore_eos=True), lora=lora, signal=signal))
    replica.admit(len(jobs))
    tickets = [ticket for job in jobs for ticket in replica.submit(job)]
    try:
        await sse.all_done(tickets, signal)
    finally:
        replica.abandon(jobs)
    data: list[dict[str, object]] = []
    for place, job in enumerate(jobs):
        numbers: object = vector(job.prompt_ids, dimensions)
        if form == "base64":
            numbers = base64.b64encode(array("f", vector(job.prompt_ids, dimensions)).tobytes()).decode()
        data.append({"index": place, "object": "embedding", "embedding": numbers})
    prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
    counted = {**usage.counts(prompt_tokens, 0), "prompt_tokens_details": None, "completion_tokens_details": None}
    answer = {
        "id": identity,
        "object": "list",
        "created": int(time.time()),
        "model": fields.text("model") or replica.settings.served_names[0],
        "data": data,
        "usage": counted,
    }
    exchange.reply(200, compact(answer), JSON_HEADERS)
