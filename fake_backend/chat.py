"""POST /v1/chat/completions."""

import json
import time
from typing import Any

from fake_backend import errors, orca, sampling, sse, usage
from fake_backend.errors import JSON_HEADERS, compact
from fake_backend.replica import Job, Replica
from fake_backend.runtime import Ticket
from fake_backend.validate import Fields, invalid, read_body
from fake_backend.wire import Exchange
from router.prompt.reader import PromptError
from router.prompt.request import Ask

_MEDIA = frozenset({"image_url", "image_pil", "image_embeds", "audio_url", "input_audio", "video_url"})


def check_messages(messages: object, model: str) -> list[Any]:
    """A list of objects that have a role. Raises ApiError 400."""
    if not isinstance(messages, list):
        raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            text = "Input should be a valid dictionary"
            raise invalid("dict_type", f"body.messages.{place}", text, message)
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(part, dict) and part.get("type") in _MEDIA for part in content):
            raise errors.ApiError(400, f"{model} is not a multimodal model")
        if "role" not in message:
            raise invalid("missing", f"body.messages.{place}.role", "Field required", message)
    return messages


def prompt_ids(replica: Replica, fields: Fields) -> list[int]:
    """Template and tokenizer, as the engine's front end applies them. Raises ApiError."""
    given = fields.array("prompt_token_ids")
    if given is not None:
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in given):
            raise invalid("int_type", "body.prompt_token_ids.0", "Input should be a valid integer", given[0])
        replica.check_prompt(given, text=False)
        return given
    ask = Ask(
        kind="chat",
        messages=fields.required("messages"),
        tools=fields.array("tools"),
        documents=fields.array("documents"),
        reasoning_effort=fields.text("reasoning_effort"),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        continue_final_message=fields.flag("continue_final_message"),
        add_special_tokens=fields.flag("add_special_tokens"),
        chat_template=fields.text("chat_template"),
        chat_template_kwargs=dict(fields.mapping("chat_template_kwargs") or {}),
    )
    try:
        (ids,) = replica.reader.tokenize(ask)
    except PromptError as error:
        raise errors.ApiError(400, errors.without_surrogates(str(error))) from error
    assert isinstance(ids, list)
    replica.check_prompt(ids, text=True)
    return ids


def _echo(replica: Replica, fields: Fields) -> tuple[int, ...] | None:
    """The last message's text, for a model that repeats what it is told."""
    messages = fields.body.get("messages")
    content = messages[-1].get("content") if isinstance(messages, list) and messages else None
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return tuple(replica.tokenizer.encode(content, False)) if isinstance(content, str) and content else None


def make_job(replica: Replica, exchange: Exchange, fields: Fields) -> Job:
    """All that can be wrong with the request is found out here. Raises ApiError."""
    request = exchange.request
    check_messages(fields.required("messages"), replica.settings.served_names[0])
    model = fields.text("model")
    sampling.check_sampling(fields)
    lora = replica.adapter(model)
    ids = prompt_ids(replica, fields)
    asked = fields.integer("max_completion_tokens")
    if asked is None:
        asked = fields.integer("max_tokens")
    echo = _echo(replica, fields) if replica.settings.style.echo else None
    job = sampling.job(
        sampling.request_id("chatcmpl", request, fields),
        fields,
        request,
        replica,
        ids,
        sampling.wish(fields, replica, ids, asked, echo),
    )
    job.lora = lora
    replica.admit(job.n)
    return job


async def handle(replica: Replica, exchange: Exchange) -> None:
    fields = Fields(read_body(exchange.request))
    options = sampling.stream_options(fields, force_usage=replica.settings.force_include_usage)
    job = make_job(replica, exchange, fields)
    model = fields.text("model") or replica.settings.served_names[0]
    tickets = replica.submit(job)
    try:
        if options.stream:
            await _stream(replica, exchange, fields, job, model, options)
        else:
            await sse.all_done(tickets, job.signal)
            _whole(replica, exchange, fields, job, model)
    finally:
        replica.abandon([job])


def _whole(replica: Replica, exchange: Exchange, fields: Fields, job: Job, model: str) -> None:
    if any(ticket.request.finish_reason == "error" for ticket in job.tickets):
        raise replica.failure()
    show_ids = fields.flag("return_token_ids")
    choices = [
        {
            "index": index,
            "message": {
                "role": "assistant",
                "content": ticket.answer.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": logprobs(replica, fields, ticket, 0, len(ticket.answer.ids)),
            "finish_reason": ticket.request.finish_reason,
            "stop_reason": ticket.answer.stop_reason,
            "token_ids": ticket.answer.ids if show_ids else None,
            "routed_experts": None,
        }
        for index, ticket in enumerate(job.tickets)
    ]
    answer = {
        "id": job.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": replica.fingerprint,
        "usage": usage.full([job.tickets], usage.chat_details(replica, job.tickets[0])),
        "prompt_logprobs": None,
        "prompt_token_ids": job.prompt_ids if show_ids else None,
        "prompt_text": None,
        "kv_transfer_params": replica.transfer_params(job.tickets[0]),
        "ec_transfer_params": None,
        "metrics": None,
    }
    orca.add(replica, exchange)
    exchange.reply(200, compact(answer), JSON_HEADERS)


async def _stream(
    replica: Replica, exchange: Exchange, fields: Fields, job: Job, model: str, options: sampling.StreamOptions
) -> None:
    show_ids = fields.flag("return_token_ids")
    wants_logprobs = fields.flag("logprobs")
    created = int(time.time())
    head = (
        f'data: {{"id":{json.dumps(job.id)},"object":"chat.completion.chunk","created":{created},'
        f'"model":{json.dumps(model, ensure_ascii=False)},'
    )
    prompt = len(job.prompt_ids)
    fingerprint = f',"system_fingerprint":"{replica.fingerprint}"'
    progress = sse.Progress(job.tickets, job.signal)
    told_role: set[int] = set()
    exchange.open(200, sse.STREAM_HEADERS)
    async for index, first, so_far in progress.steps(exchange, replica.settings.sse_keep_alive):
        ticket = job.tickets[index]
        parts: list[str] = []
        if index not in told_role and (so_far or ticket.done):
            told_role.add(index)
            ids = json.dumps(job.prompt_ids, separators=(",", ":")) if show_ids else "null"
            parts.append(
                f'{head}"choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
                f'"finish_reason":null}}]{_usage(options, prompt, 0)},"prompt_token_ids":{ids},"prompt_text":null}}\n\n'
            )
        reason = ticket.request.finish_reason
        if reason == "error":
            exchange.send("".join(parts).encode() + sse.failure(replica.failure()))
            exchange.end()
            return
        answer = ticket.answer
        start = answer.ends[first - 1] if first else 0
        text = json.dumps(answer.text[start : answer.ends[so_far - 1]] if so_far else "", ensure_ascii=False)
        shown = "null"
        if wants_logprobs:
            shown = compact(logprobs(replica, fields, ticket, first, so_far)).decode()
        ids = json.dumps(answer.ids[first:so_far], separators=(",", ":")) if show_ids else "null"
        ending = '"finish_reason":null'
        if reason is not None:
            ending = f'"finish_reason":"{reason}","stop_reason":{json.dumps(answer.stop_reason)}'
        parts.append(
            f'{head}"choices":[{{"index":{index},"delta":{{"content":{text}}},"logprobs":{shown},{ending},'
            f'"token_ids":{ids}}}]{_usage(options, prompt, so_far)}'
            f"{fingerprint if reason is not None and not options.usage_at_end else ''}}}\n\n"
        )
        exchange.send("".join(parts).encode())
    last = b""
    if options.usage_at_end:
        total = compact(usage.final([job.tickets], usage.chat_details(replica, job.tickets[0]))).decode()
        last = f'{head}"choices":[],"usage":{total}{fingerprint}}}\n\n'.encode()
    exchange.send(last + sse.DONE)
    exchange.end()


def _usage(options: sampling.StreamOptions, prompt: int, completion: int) -> str:
    if not options.usage_always:
        return ""
    return (
        f',"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt + completion},"completion_tokens":{completion},'
        '"completion_tokens_details":null}'
    )


def logprobs(replica: Replica, fields: Fields, ticket: Ticket, first: int, last: int) -> dict[str, Any] | None:
    """Log probabilities in the right shape; the numbers are made up, but always the same for the same answer."""
    if not fields.flag("logprobs"):
        return None
    wanted = fields.integer("top_logprobs") or 0
    ids = ticket.answer.ids[first:last]
    content = []
    for token in ids:
        own = _logprob(replica, token)
        others = [_logprob(replica, (token + step) % replica.tokenizer.vocab_size) for step in range(wanted)]
        content.append({**own, "top_logprobs": others})
    return {"content": content}


def _logprob(replica: Replica, token: int) -> dict[str, Any]:
    text = replica.tokenizer.decode([token])
    return {"token": text, "logprob": -0.5 - (token % 64) / 16, "bytes": list(text.encode())}
