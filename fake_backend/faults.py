"""Faults on demand: what a replica can do wrong, as rules that requests run into.

A rule has a ``kind`` and says which requests it concerns: ``path`` (a prefix, default ``/v1/``), ``skip`` (let that
many pass first) and ``times`` (for how many, default for ever). docs/fake-backend.md lists the kinds.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fake_backend.errors import JSON_HEADERS, ApiError, compact
from fake_backend.wire import ClientGoneError, Exchange

_END = b"data: [DONE]\n\n"


class FaultError(ValueError):
    """A rule that means nothing; one clear line."""


@dataclass(slots=True)
class Rule:
    """One fault. Numbers are seconds, events or bytes, as the kind has it."""

    kind: str
    path: str = "/v1/"
    skip: int = 0
    times: int | None = None
    seconds: float = 0.0
    events: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    hits: int = 0

    def concerns(self, path: str) -> bool:
        """Whether this request runs into the rule; counts it if so."""
        if not path.startswith(self.path) or self.times == 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        self.hits += 1
        return True

    def shown(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


KINDS = (
    "hang", "slow_first_token", "slow_stream", "cut", "reset", "no_done", "status", "garbage", "engine_error",
    "metrics_slow", "metrics_huge", "metrics_fail", "metrics_stale", "metrics_old_names",
    "events_lost", "events_repeated", "events_reordered",
)  # fmt: skip
METRICS_KINDS = tuple(kind for kind in KINDS if kind.startswith("metrics_"))


def read_rule(value: object) -> Rule:
    """A rule from JSON. Raises FaultError."""
    if not isinstance(value, Mapping):
        raise FaultError(f"a fault is an object with a kind, got {json.dumps(value)}")
    known = {name for name in Rule.__slots__ if name != "hits"}
    unknown = sorted(set(value) - known)
    if unknown:
        raise FaultError(f"unknown fault settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    kind = value.get("kind")
    if kind not in KINDS:
        raise FaultError(f"unknown fault kind {kind!r}; known are {', '.join(KINDS)}")
    arguments: dict[str, Any] = dict(value)
    if kind in METRICS_KINDS:
        arguments.setdefault("path", "/metrics")
    if kind.startswith("events_"):
        arguments["path"] = "events"
    for name, types in (("skip", int), ("events", int), ("status", int), ("seconds", (int, float)), ("path", str)):
        if name in arguments and not isinstance(arguments[name], types):
            raise FaultError(f"fault setting {name} has the wrong type: {arguments[name]!r}")
    return Rule(**arguments)


class Faults:
    """The rules in force. The first that concerns a request wins."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self._stale: bytes | None = None

    def add(self, rule: Rule) -> None:
        self.rules.append(rule)

    def clear(self) -> None:
        self.rules.clear()
        self._stale = None

    def find(self, path: str) -> Rule | None:
        return next((rule for rule in self.rules if rule.concerns(path)), None)

    async def before(self, rule: Rule, exchange: Exchange) -> bool:
        """What happens before the request is looked at; True if that was all."""
        match rule.kind:
            case "hang":
                await asyncio.Event().wait()
            case "slow_first_token" | "metrics_slow":
                await asyncio.sleep(rule.seconds)
            case "slow_stream":
                exchange.pause = rule.seconds
            case "cut" | "reset":
                if not rule.events:
                    exchange.reset() if rule.kind == "reset" else exchange.cut()
                    return True
                exchange.filter = _Ending(exchange, rule)
            case "no_done":
                exchange.filter = _without_end
            case "status":
                self._error(rule, exchange)
                return True
            case "garbage":
                exchange.raw((rule.body or "\x00\x01 this is no HTTP\r\n\r\n").encode("latin-1"))
                exchange.cut()
                return True
            case "metrics_fail":
                exchange.reply(rule.status, b"Internal Server Error", (("content-type", "text/plain; charset=utf-8"),))
                return True
        return False

    def metrics(self, rule: Rule, text: bytes) -> bytes:
        """What is made of an exposition."""
        match rule.kind:
            case "metrics_huge":
                filler = b'warmroute_fake_filler{series="%d"} 1.0\n'
                rows = b"".join(filler % i for i in range(max(1, rule.events) * 25_000))
                return text + b"# TYPE warmroute_fake_filler gauge\n" + rows
            case "metrics_stale":
                self._stale = self._stale or text
                return self._stale
            case "metrics_old_names":
                return text.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc").replace(
                    b"vllm:inter_token_latency_seconds", b"vllm:time_per_output_token_seconds"
                )
        return text

    def _error(self, rule: Rule, exchange: Exchange) -> None:
        kind = "InternalServerError" if rule.status >= 500 else "BadRequestError"
        body = ApiError(rule.status, "A fault was asked for", kind).body()
        if rule.body is not None:
            body = rule.body.encode()
        exchange.reply(rule.status, body, (*JSON_HEADERS, *rule.headers.items()))


class _Ending:
    """Lets ``events`` server-sent events through, then ends the connection; of any other body, the first half."""

    def __init__(self, exchange: Exchange, rule: Rule) -> None:
        self._exchange = exchange
        self._rule = rule
        self._left = rule.events

    def __call__(self, data: bytes) -> bytes:
        if not data.startswith((b"data:", b"event:")):
            self._exchange.raw(data[: len(data) // 2])
            self._end()
        pieces = data.split(b"\n\n")[:-1]
        if len(pieces) <= self._left:
            self._left -= len(pieces)
            return data
        kept = b"".join(piece + b"\n\n" for piece in pieces[: self._left])
        if kept:
            self._exchange.raw(b"%x\r\n%b\r\n" % (len(kept), kept))
        self._end()
        return b""

    def _end(self) -> None:
        if self._rule.kind == "reset":
            self._exchange.reset()
        else:
            self._exchange.cut()
        raise ClientGoneError


def _without_end(data: bytes) -> bytes:
    return data.replace(_END, b"")


def shown(rules: list[Rule]) -> bytes:
    return compact({"faults": [rule.shown() for rule in rules]})
