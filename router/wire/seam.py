"""Where an answer that broke off goes on: the second replica's events made to follow the first one's.

Nothing here is on an undisturbed answer's way: those pass byte for byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from router.wire.stream import Said


class Seam:
    """Turns pieces of the second replica's stream into what the client is to get: one answer, with one identity, one
    role and one count of tokens."""

    __slots__ = ("_said", "_tokens", "ended", "spoilt")

    def __init__(self, said: Said, tokens: int) -> None:
        """`said`: what the client has been given. `tokens`: how many of the continued prompt's are the answer's."""
        self._said = said
        self._tokens = tokens
        self.ended = False
        """The stream's last event is through."""
        self.spoilt = False
        """It goes on with something else than text: the seam would show."""

    def feed(self, events: bytes) -> bytes:
        """Whole events, rewritten."""
        given = []
        for event in events.split(b"\n\n")[:-1]:
            made = self._event(event)
            if self.spoilt:
                break
            if made is not None:
                given.append(made + b"\n\n")
        return b"".join(given)

    def _event(self, event: bytes) -> bytes | None:
        if not event or event.startswith(b":"):
            return event  # a comment keeps the connection alive
        if not event.startswith(b"data:"):
            self.spoilt = True
            return None
        data = event[5:].strip()
        if data == b"[DONE]":
            self.ended = True
            return event
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            self.spoilt = True
            return None
        if not isinstance(value, dict) or not isinstance(choices := value.get("choices"), list):
            self.spoilt = True
            return None
        for choice in choices:
            if not self._choice(choice):
                return None
        value |= {name: told for name, told in self._said.identity.items() if name in value}
        if isinstance(usage := value.get("usage"), dict):
            self._sum(usage)
        return b"data: " + orjson.dumps(value)

    def _choice(self, choice: Any) -> bool:
        """Whether there is something to pass on in it."""
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            self.spoilt = True
            return False
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return True
        if any(delta.get(name) for name in ("tool_calls", "reasoning", "reasoning_content")):
            self.spoilt = True
            return False
        if "role" in delta and self._said.role:
            if not delta.get("content") and choice.get("finish_reason") is None:
                return False
            del delta["role"]
        return True

    def _sum(self, usage: dict[str, Any]) -> None:
        """What both engines did, counted as if one had: the first one's tokens are no part of the prompt."""
        tokens, prompt = self._tokens, usage.get("prompt_tokens")
        if not isinstance(prompt, int):
            return
        told = self._said.prompt_tokens
        usage["prompt_tokens"] = prompt = told if told is not None else prompt - tokens
        completion = usage.get("completion_tokens")
        if isinstance(completion, int):
            usage["completion_tokens"] = completion = completion + tokens
            usage["total_tokens"] = prompt + completion
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
            details["cached_tokens"] = min(cached, prompt)
