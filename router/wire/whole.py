"""What is read of the usual whole answer, of chat completions or completions: all else in it is passed over.

Not compiled: msgspec asks for the types of what it reads into.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Details(msgspec.Struct, gc=False):
    cached_tokens: Any = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Details | None = None


class Message(msgspec.Struct, gc=False):
    content: Any = None
    tool_calls: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class Choice(msgspec.Struct, gc=False):
    message: Message | None = None
    text: Any = None
    token_ids: Any = None
    finish_reason: Any = None


class Whole(msgspec.Struct, gc=False):
    """Its containers have to be what they should; of what they hold anything may have come."""

    choices: list[Choice]
    error: Any = None
    object: Any = None
    type: Any = None
    usage: Usage | None = None
