"""POST /v1/completions: a text, several texts, token ids, or several lists of them."""

import json
import time
from dataclasses import replace
from typing import Any

from fake_backend import errors, orca, sampling, sse, usage
from fake_backend.errors import JSON_HEADERS, compact
from fake_backend.replica import Job, Replica
from fake_backend.runtime import Signal, Ticket
from fake_backend.validate import Fields, invalid, read_body
from fake_backend.wire import Exchange

DEFAULT_MAX_TOKENS = 16


def read_prompts(value: Any) -> list[str | list[int]]:
    """The ``prompt`` of a body as a list. Raises ApiError 400."""
    if value is None or value == "" or value == []:
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise errors.ApiError(400, message, param="prompt")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return value
        if all(_is_id(item) for item in value):
            return [value]
        if all(isinstance(item, list) and all(_is_id(token) for token in item) for item in value):
            return value
    raise invalid("string_type", "body.prompt", "Input should be a valid string", value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def token_ids(replica: Replica, prompt: str | list[int], *, special: bool) -> list[int]:
    """A prompt's ids, whichever way it was given. Raises ApiError 400 for text that is no Unicode."""
    if not isinstance(prompt, str):
        return list(prompt)
    try:
        return replica.tokenizer.encode(prompt, special)
    except ValueError as error:
        raise errors.ApiError(400, errors.without_surrogates(str(error))) from error


def make_jobs(replica: Replica, exchange: Exchange, fields: Fields) -> list[Job]:
    """One job per prompt; all that can be wrong with the request is found out here. Raises ApiError."""
    fields.text("model")
    sampling.check_sampling(fields)
    replica.adapter(fields.text("model"))
    prompts = read_prompts(fields.body.get("prompt"))
    special = fields.flag("add_special_tokens", True)
    asked = fields.integer("max_tokens")
    if asked is None and "max_tokens" not in fields.body:
        asked = DEFAULT_MAX_TOKENS
    identity = sampling.request_id("cmpl", exchange.request, fields)
    signal = Signal()
    jobs: list[Job] = []
    for place, prompt in enumerate(prompts):
        ids = token_ids(replica, prompt, special=special)
        replica.check_prompt(ids, text=isinstance(prompt, str))
        wanted = sampling.wish(fields, replica, ids, asked, tuple(ids))
        if wanted.given is not None and len(wanted.given) > 1:
            wanted = replace(wanted, given=wanted.given[place:] + wanted.given[:place])
        job = sampling.job(f"{identity}-{place}", fields, exchange.request, replica, ids, wanted)
        job.signal = signal
        jobs.append(job)
    replica.admit(sum(job.n for job in jobs))
    return jobs


async def handle(replica: Replica, exchange: Exchange) -> None:
    fields = Fields(read_body(exchange.request))
    options = sampling.stream_options(fields, force_usage=replica.settings.force_include_usage)
    jobs = make_jobs(replica, exchange, fields)
    identity = jobs[0].id.rsplit("-", 1)[0]
    model = fields.text("model") or replica.settings.served_names[0]
    tickets = [ticket for job in jobs for ticket in replica.submit(job)]
    try:
        if options.stream:
            await _stream(replica, exchange, fields, jobs, identity, model, options)
        else:
            await sse.all_done(tickets, jobs[0].signal)
            _whole(replica, exchange, fields, jobs, identity, model)
    finally:
        replica.abandon(jobs)


def _prefix(replica: Replica, fields: Fields, ticket: Ticket) -> str:
    return replica.tokenizer.decode(ticket.prompt_ids) if fields.flag("echo") else ""


def _whole(replica: Replica, exchange: Exchange, fields: Fields, jobs: list[Job], identity: str, model: str) -> None:
    tickets = [ticket for job in jobs for ticket in job.tickets]
    if any(ticket.request.finish_reason == "error" for ticket in tickets):
        raise replica.failure()
    show_ids = fields.flag("return_token_ids")
    choices = [
        {
            "index": index,
            "text": _prefix(replica, fields, ticket) + ticket.answer.text,
            "logprobs": logprobs(replica, fields, ticket, 0, len(ticket.answer.ids)),
            "finish_reason": ticket.request.finish_reason,
            "stop_reason": ticket.answer.stop_reason,
            "token_ids": ticket.answer.ids if show_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": ticket.prompt_ids if show_ids else None,
            "routed_experts": None,
        }
        for index, ticket in enumerate(tickets)
    ]
    answer = {
        "id": identity,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": replica.fingerprint,
        "usage": usage.full([job.tickets for job in jobs], usage.details(replica, jobs)),
        "kv_transfer_params": replica.transfer_params(tickets[0]),
        "ec_transfer_params": None,
        "metrics": None,
    }
    orca.add(replica, exchange)
    exchange.reply(200, compact(answer), JSON_HEADERS)


async def _stream(
    replica: Replica,
    exchange: Exchange,
    fields: Fields,
    jobs: list[Job],
    identity: str,
    model: str,
    options: sampling.StreamOptions,
) -> None:
    show_ids = fields.flag("return_token_ids")
    created = int(time.time())
    head = (
        f'data: {{"id":{json.dumps(identity)},"object":"text_completion","created":{created},'
        f'"model":{json.dumps(model, ensure_ascii=False)},'
    )
    fingerprint = f',"system_fingerprint":"{replica.fingerprint}"'
    tickets = [ticket for job in jobs for ticket in job.tickets]
    progress = sse.Progress(tickets, jobs[0].signal)
    wants_logprobs = fields.integer("logprobs") is not None
    exchange.open(200, sse.STREAM_HEADERS)
    async for index, first, so_far in progress.steps(exchange, replica.settings.sse_keep_alive):
        ticket = tickets[index]
        reason = ticket.request.finish_reason
        if reason == "error":
            exchange.send(sse.failure(replica.failure()))
            exchange.end()
            return
        answer = ticket.answer
        start = answer.ends[first - 1] if first else 0
        said = answer.text[start : answer.ends[so_far - 1]] if so_far else ""
        if not first:
            said = _prefix(replica, fields, ticket) + said
        shown = "null"
        if wants_logprobs:
            shown = compact(logprobs(replica, fields, ticket, first, so_far)).decode()
        prompt_ids = json.dumps(ticket.prompt_ids, separators=(",", ":")) if show_ids and not first else "null"
        ids = json.dumps(answer.ids[first:so_far], separators=(",", ":")) if show_ids else "null"
        stop = answer.stop_reason if reason else None
        running = ""
        if options.usage_always:
            running = f',"usage":{compact(usage.counts(len(ticket.prompt_ids), so_far)).decode()}'
        exchange.send(
            (
                f'{head}"choices":[{{"index":{index},"text":{json.dumps(said, ensure_ascii=False)},"logprobs":{shown},'
                f'"finish_reason":{json.dumps(reason)},"stop_reason":{json.dumps(stop)},'
                f'"prompt_token_ids":{prompt_ids},"token_ids":{ids}}}]{running}'
                f"{fingerprint if reason is not None and not options.usage_at_end else ''}}}\n\n"
            ).encode()
        )
    last = b""
    if options.usage_at_end:
        groups = [job.tickets for job in jobs]
        total = compact(usage.final(groups, usage.details(replica, jobs))).decode()
        last = f'{head}"choices":[],"usage":{total}{fingerprint}}}\n\n'.encode()
    exchange.send(last + sse.DONE)
    exchange.end()


def logprobs(replica: Replica, fields: Fields, ticket: Ticket, first: int, last: int) -> dict[str, Any] | None:
    """Log probabilities in the right shape; made-up numbers, the same for the same token."""
    wanted = fields.integer("logprobs")
    if wanted is None:
        return None
    ids = ticket.answer.ids[first:last]
    texts = [replica.tokenizer.decode([token]) for token in ids]
    numbers = [-0.5 - (token % 64) / 16 for token in ids]
    offsets = [ticket.answer.ends[first + place - 1] if first + place else 0 for place in range(len(ids))]
    return {
        "text_offset": offsets,
        "token_logprobs": numbers,
        "tokens": texts,
        "top_logprobs": [{text: number} for text, number in zip(texts, numbers, strict=True)],
    }
