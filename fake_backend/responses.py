"""POST /v1/responses: OpenAI's Responses API. Nothing is stored, as in a vLLM that was not told to."""

import secrets
import time
from typing import Any

from fake_backend import chat, sse
from fake_backend.errors import JSON_HEADERS, ApiError, compact
from fake_backend.replica import Job, Replica
from fake_backend.runtime import Ticket
from fake_backend.validate import Body, Fields, invalid, read_body
from fake_backend.wire import Exchange


def as_chat(fields: Fields) -> Body:
    """The same request in the terms of chat completions."""
    given = fields.required("input")
    messages: list[Any] = []
    instructions = fields.text("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        messages += [_message(item) for item in given]
    else:
        raise invalid("string_type", "body.input", "Input should be a valid string", given)
    kept = {name: fields.body[name] for name in _KEPT if name in fields.body}
    return kept | {"messages": messages, "max_tokens": fields.integer("max_output_tokens")}


_KEPT = (
    "model", "temperature", "top_p", "seed", "cache_salt", "priority", "request_id", "vllm_xargs", "ignore_eos",
    "kv_transfer_params", "stop", "chat_template_kwargs",
)  # fmt: skip


def _message(item: object) -> object:
    """An input item as a chat message: parts of text in one text."""
    if not isinstance(item, dict) or not isinstance(item.get("content"), list):
        return item
    texts = [part.get("text", "") for part in item["content"] if isinstance(part, dict) and "text" in part]
    return {"role": item.get("role", "user"), "content": "\n".join(texts)}


class _Shape:
    """One response, as it looks at each stage."""

    def __init__(self, fields: Fields, job: Job, model: str, room: int) -> None:
        self.id = f"resp_{job.id.removeprefix('chatcmpl-')}"
        self.item = f"msg_{secrets.token_hex(8)}"
        self._created = int(time.time())
        self._fields = fields
        self._model = model
        self._most = fields.integer("max_output_tokens") or room

    def object(self, ticket: Ticket | None) -> Body:
        """``ticket`` None: still in progress."""
        fields = self._fields
        cut = ticket is not None and ticket.request.finish_reason == "length"
        status = "in_progress" if ticket is None else "incomplete" if cut else "completed"
        return {
            "id": self.id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": fields.text("instructions"),
            "metadata": fields.body.get("metadata"),
            "model": self._model,
            "object": "response",
            "output": [] if ticket is None else [self.message(ticket)],
            "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
            "temperature": _float(fields, "temperature"),
            "tool_choice": fields.body.get("tool_choice") or "none",
            "tools": fields.array("tools") or [],
            "top_p": _float(fields, "top_p"),
            "background": fields.flag("background"),
            "max_output_tokens": self._most,
            "max_tool_calls": fields.body.get("max_tool_calls"),
            "previous_response_id": fields.body.get("previous_response_id"),
            "prompt": fields.body.get("prompt"),
            "reasoning": fields.body.get("reasoning"),
            "service_tier": fields.text("service_tier") or "auto",
            "status": status,
            "text": fields.body.get("text"),
            "top_logprobs": fields.body.get("top_logprobs"),
            "truncation": fields.text("truncation") or "disabled",
            "usage": None if ticket is None else _usage(ticket),
            "user": fields.body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def message(self, ticket: Ticket | None) -> Body:
        content = [] if ticket is None else [self.part(ticket.answer.text, None)]
        status = "in_progress" if ticket is None else "completed"
        return {
            "id": self.item,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def part(self, text: str, logprobs: list[Any] | None) -> Body:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _float(fields: Fields, name: str) -> float:
    value = fields.number(name)
    return 1.0 if value is None else float(value)


def _usage(ticket: Ticket) -> Body:
    prompt, generated = len(ticket.prompt_ids), ticket.request.generated
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": ticket.request.cached_tokens or 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": generated,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt + generated,
    }


async def handle(replica: Replica, exchange: Exchange) -> None:
    fields = Fields(read_body(exchange.request))
    job = chat.make_job(replica, exchange, Fields(as_chat(fields)))
    model = fields.text("model") or replica.settings.served_names[0]
    shape = _Shape(fields, job, model, job.wish.max_tokens)
    begun = shape.object(None)  # also finds what is wrong with the fields that are only shown
    (ticket,) = replica.submit(job)
    try:
        if fields.flag("stream"):
            await _stream(replica, exchange, job, shape, begun)
            return
        await sse.all_done(job.tickets, job.signal)
        if ticket.request.finish_reason == "error":
            raise replica.failure()
        exchange.reply(200, compact(shape.object(ticket)), JSON_HEADERS)
    finally:
        replica.abandon([job])


class _Events:
    """Numbered events."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, kind: str, value: Body) -> bytes:
        number, self._number = self._number, self._number + 1
        # Keys in alphabetical order, as the recorded streams have them; the whole response keeps its own.
        ordered = dict(sorted((value | {"sequence_number": number, "type": kind}).items()))
        return b"event: " + kind.encode() + b"\ndata: " + compact(ordered) + b"\n\n"


async def _stream(replica: Replica, exchange: Exchange, job: Job, shape: _Shape, first: Body) -> None:
    (ticket,) = job.tickets
    event = _Events()
    place: Body = {"content_index": 0, "item_id": shape.item, "output_index": 0}
    exchange.open(200, sse.STREAM_HEADERS)
    exchange.send(event("response.created", {"response": first}) + event("response.in_progress", {"response": first}))
    begun = False
    answer = ticket.answer
    async for _index, told, so_far in sse.Progress(job.tickets, job.signal).steps(exchange):
        if ticket.request.finish_reason == "error":
            exchange.send(sse.failure(replica.failure()))
            exchange.end()
            return
        parts: list[bytes] = []
        if not begun:
            begun = True
            parts.append(event("response.output_item.added", {"item": shape.message(None), "output_index": 0}))
            parts.append(event("response.content_part.added", place | {"part": shape.part("", [])}))
        text = answer.text[answer.ends[told - 1] if told else 0 : answer.ends[so_far - 1]] if so_far else ""
        if text:
            parts.append(event("response.output_text.delta", place | {"delta": text, "logprobs": []}))
        exchange.send(b"".join(parts))
    exchange.send(
        event("response.output_text.done", place | {"logprobs": [], "text": answer.text})
        + event("response.content_part.done", place | {"part": shape.part(answer.text, None)})
        + event("response.output_item.done", {"item": shape.message(ticket), "output_index": 0})
        + event("response.completed", {"response": shape.object(ticket)})
    )
    exchange.end()


async def not_stored(replica: Replica, exchange: Exchange) -> None:
    """GET /v1/responses/{id} and POST .../cancel."""
    del replica
    identity = exchange.request.path.split("/")[3]
    raise ApiError(404, f"Response with id '{identity}' not found.", "invalid_request_error", "response_id")
