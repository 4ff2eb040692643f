"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as vLLM serves it beside OpenAI's."""

from typing import Any

from fake_backend import chat, sse, usage
from fake_backend.errors import JSON_HEADERS, ApiError, compact
from fake_backend.replica import Job, Replica
from fake_backend.runtime import Ticket
from fake_backend.validate import Body, Fields, read_body
from fake_backend.wire import Exchange


def as_chat(fields: Fields) -> Body:
    """The same request in OpenAI's terms."""
    messages: list[Any] = []
    system = fields.body.get("system")
    if system:
        messages.append({"role": "system", "content": _text(system)})
    given = chat.check_messages(fields.required("messages"), fields.text("model") or "")
    messages += [{**message, "content": _text(message.get("content"))} for message in given]
    body = {name: value for name, value in fields.body.items() if name not in ("system", "stop_sequences", "messages")}
    return body | {"messages": messages, "stop": fields.array("stop_sequences"), "stream_options": None}


def _text(content: object) -> object:
    """Blocks of text as one text."""
    if not isinstance(content, list):
        return content
    texts = [block.get("text", "") for block in content if isinstance(block, dict) and block.get("type") == "text"]
    return "\n".join(texts)


def _refuse(exchange: Exchange, error: ApiError) -> None:
    body = {"type": "error", "error": {"type": error.kind, "message": error.message}}
    exchange.reply(error.status, compact(body), JSON_HEADERS)


def _counted(replica: Replica, ticket: Ticket, output: int) -> dict[str, int]:
    details = usage.chat_details(replica, ticket)
    counted = {"input_tokens": len(ticket.prompt_ids), "output_tokens": output}
    if details is None or not ticket.request.generated:
        return counted
    read, created = details["cached_tokens"] or 0, details["created_cache_tokens"] or 0
    shown = {"cache_creation_input_tokens": created, "cache_read_input_tokens": read}
    return counted | {"input_tokens": max(0, counted["input_tokens"] - read - created)} | shown


def _stop(ticket: Ticket) -> tuple[str | None, str | None]:
    """(stop_reason, stop_sequence)."""
    reason = ticket.request.finish_reason
    if reason == "length":
        return "max_tokens", None
    if reason != "stop":
        return None, None
    if isinstance(ticket.answer.stop_reason, str):
        return "stop_sequence", ticket.answer.stop_reason
    return "end_turn", None


async def handle(replica: Replica, exchange: Exchange) -> None:
    outer = Fields(read_body(exchange.request))
    outer.required("messages")
    outer.required("max_tokens")
    try:
        job = chat.make_job(replica, exchange, Fields(as_chat(outer)))
    except ApiError as error:
        if error.kind == "Bad Request":
            raise
        _refuse(exchange, error)
        return
    model = outer.text("model") or replica.settings.served_names[0]
    (ticket,) = replica.submit(job)
    try:
        if outer.flag("stream"):
            await _stream(replica, exchange, job, model)
            return
        await sse.all_done(job.tickets, job.signal)
        if ticket.request.finish_reason == "error":
            _refuse(exchange, replica.failure())
            return
        stop_reason, stop_sequence = _stop(ticket)
        answer: Body = {
            "id": job.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": ticket.answer.text}],
            "model": model,
            "stop_reason": stop_reason,
        }
        if stop_sequence is not None:
            answer["stop_sequence"] = stop_sequence
        answer["usage"] = _counted(replica, ticket, ticket.request.generated)
        exchange.reply(200, compact(answer), JSON_HEADERS)
    finally:
        replica.abandon([job])


def _event(name: str, value: Body) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + compact({"type": name} | value) + b"\n\n"


async def _stream(replica: Replica, exchange: Exchange, job: Job, model: str) -> None:
    (ticket,) = job.tickets
    exchange.open(200, sse.STREAM_HEADERS)
    begun = False
    async for _index, first, so_far in sse.Progress(job.tickets, job.signal).steps(exchange):
        if ticket.request.finish_reason == "error":
            failure = replica.failure()
            exchange.send(_event("error", {"error": {"type": failure.kind, "message": failure.message}}))
            exchange.end()
            return
        parts: list[bytes] = []
        if not begun:
            begun = True
            start: Body = {
                "id": job.id, "type": "message", "role": "assistant", "content": [], "model": model,
                "stop_reason": None, "stop_sequence": None,
                "usage": {"input_tokens": len(job.prompt_ids), "output_tokens": 0},
            }  # fmt: skip
            parts.append(_event("message_start", {"message": start}))
            parts.append(_event("content_block_start", {"content_block": {"type": "text", "text": ""}, "index": 0}))
        answer = ticket.answer
        text = answer.text[answer.ends[first - 1] if first else 0 : answer.ends[so_far - 1]] if so_far else ""
        if text:
            delta = {"delta": {"type": "text_delta", "text": text}, "index": 0}
            parts.append(_event("content_block_delta", delta))
        exchange.send(b"".join(parts))
    stop_reason, stop_sequence = _stop(ticket)
    delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
    counted = _counted(replica, ticket, ticket.request.generated)
    exchange.send(
        _event("content_block_stop", {"index": 0})
        + _event("message_delta", {"delta": delta, "usage": counted})
        + _event("message_stop", {})
    )
    exchange.end()


async def count_tokens(replica: Replica, exchange: Exchange) -> None:
    outer = Fields(read_body(exchange.request))
    outer.required("messages")
    try:
        replica.adapter(outer.text("model"))
        ids = chat.prompt_ids(replica, Fields(as_chat(outer)))
    except ApiError as error:
        if error.kind == "Bad Request":
            raise
        _refuse(exchange, error)
        return
    counted = {"input_tokens": len(ids), "context_management": {"original_input_tokens": len(ids)}}
    exchange.reply(200, compact(counted), JSON_HEADERS)
