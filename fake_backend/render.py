"""The scale-out endpoints: /v1/{chat/,}completions/render and /inference/v1/generate, which work on token ids."""

import math
import secrets
import time
from typing import Any

from fake_backend import chat, completions, errors, sampling, sse, usage
from fake_backend.errors import JSON_HEADERS, compact
from fake_backend.replica import Job, Replica
from fake_backend.validate import Body, Fields, invalid, read_body
from fake_backend.wire import Exchange


def _guard(replica: Replica) -> None:
    if not replica.settings.scale_out:
        raise errors.scale_out_disabled()


def _sampling_params(fields: Fields, job: Job) -> dict[str, Any]:
    """VLLM's SamplingParams, as far as a body sets them, with the defaults of the rest."""

    def number(name: str, default: float) -> float:
        value = fields.number(name)
        return default if value is None or not math.isfinite(value) else float(value)

    return {
        "presence_penalty": number("presence_penalty", 0.0),
        "frequency_penalty": number("frequency_penalty", 0.0),
        "repetition_penalty": number("repetition_penalty", 1.0),
        "temperature": number("temperature", 1.0),
        "top_p": number("top_p", 1.0),
        "min_p": number("min_p", 0.0),
        "stop": list(job.wish.stop),
        "stop_token_ids": list(job.wish.stop_token_ids),
        "max_tokens": job.wish.max_tokens,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": not job.reads_cache,
    }


def _rendered(fields: Fields, job: Job, identity: str) -> Body:
    return {
        "request_id": identity,
        "token_ids": job.prompt_ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": _sampling_params(fields, job),
        "model": fields.text("model"),
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": fields.body.get("return_token_ids"),
        "output_mode": "tokens",
        "stream": fields.flag("stream"),
        "stream_options": fields.body.get("stream_options"),
        "cache_salt": job.cache_salt,
        "priority": job.priority,
        "kv_transfer_params": fields.body.get("kv_transfer_params"),
        "ec_transfer_params": fields.body.get("ec_transfer_params"),
    }


async def render_chat(replica: Replica, exchange: Exchange) -> None:
    _guard(replica)
    fields = Fields(read_body(exchange.request))
    job = chat.make_job(replica, exchange, fields)
    exchange.reply(200, compact(_rendered(fields, job, job.id)), JSON_HEADERS)


async def render_completion(replica: Replica, exchange: Exchange) -> None:
    _guard(replica)
    fields = Fields(read_body(exchange.request))
    jobs = completions.make_jobs(replica, exchange, fields)
    identity = jobs[0].id.rsplit("-", 1)[0]
    exchange.reply(200, compact([_rendered(fields, job, identity) for job in jobs]), JSON_HEADERS)


async def generate(replica: Replica, exchange: Exchange) -> None:
    """Token ids in, token ids out."""
    _guard(replica)
    outer = Fields(read_body(exchange.request))
    ids = outer.required("token_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise invalid("list_type", "body.token_ids", "Input should be a valid list", ids)
    params = outer.mapping("sampling_params") or {}
    fields = Fields({**outer.body, **params})
    sampling.check_sampling(fields)
    replica.check_prompt(ids, text=False)
    options = sampling.stream_options(outer, force_usage=replica.settings.force_include_usage)
    given = outer.text("request_id") or exchange.request.headers.get("x-request-id") or secrets.token_hex(8)
    identity = f"generate-tokens-{given}"
    wanted = sampling.wish(fields, replica, ids, fields.integer("max_tokens"), tuple(ids))
    job = sampling.job(identity, fields, exchange.request, replica, ids, wanted)
    replica.admit(job.n)
    tickets = replica.submit(job)
    try:
        if options.stream:
            await _stream(replica, exchange, job, options, identity)
            return
        await sse.all_done(tickets, job.signal)
        if any(ticket.request.finish_reason == "error" for ticket in tickets):
            raise replica.failure()
        answer = {
            "request_id": identity,
            "model": outer.text("model") or replica.settings.served_names[0],
            "created": int(time.time()),
            "usage": usage.full([tickets], usage.details(replica, [job])),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": ids if outer.flag("return_token_ids") else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": replica.transfer_params(tickets[0]),
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [_choice(job, index, 0, len(t.answer.ids), ended=True) for index, t in enumerate(tickets)],
        }
        exchange.reply(200, compact(answer), JSON_HEADERS)
    finally:
        replica.abandon([job])


def _choice(job: Job, index: int, first: int, last: int, *, ended: bool) -> Body:
    ticket = job.tickets[index]
    versions = [{"version": "default", "start": 0, "end": len(ticket.answer.ids)}] if ended else None
    return {
        "index": index,
        "finish_reason": ticket.request.finish_reason if ended else None,
        "stop_reason": ticket.answer.stop_reason if ended else None,
        "token_ids": ticket.answer.ids[first:last],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": versions,
        "logprobs": None,
    }


async def _stream(
    replica: Replica, exchange: Exchange, job: Job, options: sampling.StreamOptions, identity: str
) -> None:
    exchange.open(200, sse.STREAM_HEADERS)
    prompt = len(job.prompt_ids)
    async for index, first, so_far in sse.Progress(job.tickets, job.signal).steps(exchange):
        ended = job.tickets[index].done
        if job.tickets[index].request.finish_reason == "error":
            exchange.send(sse.failure(replica.failure()))
            exchange.end()
            return
        chunk = {
            "request_id": identity,
            "usage": usage.counts(prompt, so_far) if options.usage_always else None,
            "output_mode": "tokens",
            "choices": [_choice(job, index, first, so_far, ended=ended)],
        }
        exchange.send(sse.event(chunk))
    if options.usage_at_end:
        total = usage.final([job.tickets], usage.details(replica, [job]))
        exchange.send(sse.event({"request_id": identity, "usage": total, "output_mode": "tokens", "choices": []}))
    exchange.send(sse.DONE)
    exchange.end()


async def abort_requests(replica: Replica, exchange: Exchange) -> None:
    """POST /inference/v1/abort_requests {"request_ids": [...]}: end those requests here and now."""
    _guard(replica)
    fields = Fields(read_body(exchange.request))
    wanted = tuple(str(identity) for identity in fields.array("request_ids") or ())
    for engine in replica.engines:
        for request in list(engine.scheduler):
            if wanted and request.id.startswith(wanted):
                engine.abort(request, replica.clock.now())
    for rank in replica.ranks:
        rank.runtime.nudge()
    exchange.reply(200, b"", (("vary", "Origin"),))
