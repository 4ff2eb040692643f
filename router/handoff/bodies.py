"""The bodies of both legs: the client's own, with as few bytes changed as the hand-over needs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from router.prompt.members import codec_of, edited

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.handoff.connector import Parameters

# One token is generated, whole, and nobody reads it; what bounds answers from below would be refused beside it.
_PREFILL: Mapping[str, bytes | None] = {
    "max_tokens": b"1",
    "min_tokens": None,
    "min_completion_tokens": None,
    "stream_options": None,
    "best_of": None,
}
# These are changed only where they are there: an engine's default is what is wanted.
_WHERE_GIVEN: Mapping[str, bytes] = {"stream": b"false", "max_completion_tokens": b"1", "n": b"1"}


def prefill_body(body: bytes, parameters: Parameters | None, *, token_ids: bool = False) -> bytes:
    """For the replica that computes the prompt. `body` is a JSON object with a prompt, and holds no hand-off.
    `token_ids`: it is to tell those of the prompt."""
    changes = dict(_PREFILL)
    if parameters is not None:
        changes["kv_transfer_params"] = orjson.dumps(parameters)
    if token_ids:
        changes["return_token_ids"] = b"true"
    return edited(body, changes, where_given=_WHERE_GIVEN)


def decode_body(body: bytes, parameters: Parameters | None) -> bytes:
    """For the replica that answers: every byte as the client sent it, and the parameters behind the last member."""
    if parameters is None:
        return body
    codec = codec_of(body)
    if codec.name != "utf-8":
        return edited(body, {"kv_transfer_params": orjson.dumps(parameters)})
    end = body.rindex(b"}")
    return b'%s,"kv_transfer_params":%s%s' % (body[:end], orjson.dumps(parameters), body[end:])
