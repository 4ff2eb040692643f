"""Faults that routers before engines are known for, by name; tests say which of them they show to be absent.

    @pytest.mark.fault("split characters")

`make conformance` runs these tests and, when all pass, writes docs/conformance.md. `tests/test_conformance.py` holds
that page to the tests that there are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "conformance.md"

# Room, name: what goes wrong; what is right.
FAULTS: dict[str, dict[str, tuple[str, str]]] = {
    "Leaving, load and the end": {
        "work for nobody": (
            "A client leaves a request that is not streamed, and the engine generates to the end",
            "the replica's connection closes at once",
        ),
        "left before the first byte": (
            "A client leaves a stream while the replica has not begun, when nobody looks at the client",
            "the replica's connection closes at once",
        ),
        "left in a retry": (
            "A client leaves while its request is with its second replica",
            "that one is left too, and no third is asked",
        ),
        "load of the aborted": (
            "Each request that is given up stays counted, until all new prompts go to the one replica that is not",
            "the books return to zero; after a restart cold prompts go to both",
        ),
        "probes reset load": (
            "A health check sets the count of running requests to zero",
            "the count is of what runs, whatever probes say",
        ),
        "load ends at the head": (
            "A stream is no longer counted once its head has come",
            "it is counted to its end",
        ),
        "load begins at the answer": (
            "A request is counted when its answer begins, so that a burst goes to one replica",
            "it is counted with the decision: half of a burst at each",
        ),
        "load of the dead": (
            "Ends of a dead process's requests are counted against its successor, below zero",
            "each process has its own books, never below zero",
        ),
        "sudden end": (
            "On SIGTERM new connections are refused though the load balancer still sends, or the end never comes",
            "not ready at once, serving through the grace, streams end, then the process, within a bound",
        ),
        "cut without a word": (
            "What has not ended when the drain's time is up fails with a 500, or just breaks",
            "503 as JSON where no answer had begun; an error event in a stream",
        ),
    },
    "Bytes of a stream": {
        "split characters": (
            "Characters of several bytes that are split over packets come out broken",
            "the same bytes, however they are split",
        ),
        "split events": (
            "An event that is split over packets is misread, and its usage lost",
            "the same bytes, and the usage is read",
        ),
        "odd event lines": (
            "`data:` without a space, CRLF, comments and `event:` lines are ignored or dropped",
            "passed on and read",
        ),
        "end within text": (
            "Generated text that holds `data: [DONE]` ends the stream",
            "only a line of its own is an end",
        ),
        "usage apart from the end": (
            "Usage and `[DONE]` come in different packets, and no tokens are counted",
            "they are counted",
        ),
        "usage reshaped": (
            "The event that carries usage has choices, comes twice, is dropped, or lacks the cached tokens",
            "as the replica sent it",
        ),
        "long lines": ("An event of megabytes is refused as too long a line", "it passes"),
        "compressed stream": ("A gzip stream, flushed at each event, breaks", "the same bytes, each event as it comes"),
        "encoding told wrong": (
            "Content-Encoding and body disagree, in answers and in errors",
            "both as the replica sent them",
        ),
        "silent truncation": (
            "A stream whose replica dies ends as if it were whole, or in half an event",
            "it goes on at another replica, or an error event and no `[DONE]`, or a broken connection",
        ),
        "silence during prefill": (
            "Proxies in between cut a stream whose prefill takes a minute",
            "with `sse_keep_alive_seconds`, a comment in each such pause",
        ),
        "held back": ("Chunks are gathered before they are passed on", "each is passed on as it comes"),
        "small packets wait": (
            "Nagle's algorithm holds a small packet until the one before is acknowledged",
            "TCP_NODELAY on both sides; what arrives together leaves together",
        ),
    },
    "Headers, bodies and the edges of HTTP": {
        "answer headers": (
            "Headers of an answer are doubled, merged or lost",
            "each as often as the replica sent it",
        ),
        "hop-by-hop": (
            "Headers of one connection are passed on: those that Connection names, Proxy-Authorization",
            "they end at the router, both ways",
        ),
        "content type": (
            "An answer's Content-Type is replaced by what the request lets expect",
            "the replica's own, for streams and for errors of streams",
        ),
        "our own headers": (
            "Headers that the router uses inside are taken from clients, and steer it",
            "a client's are dropped",
        ),
        "identity": (
            "Request ids and trace context are lost on the way",
            "they reach the replica, and come back as it answers them",
        ),
        "large bodies": (
            "Long prompts and images fail with 413 or 500 at some library's limit",
            "they pass up to the documented limit; beyond it, a 413 as JSON names the setting",
        ),
        "benchmark clients": (
            "Clients that keep few connections and reuse them see errors after their first requests",
            "all are answered",
        ),
        "malformed bodies": (
            "Bodies that are no object, broken, very deep or no UTF-8 are a 500",
            "the engine's own 400, unchanged",
        ),
        "tools without parameters": ("A tool that has no parameters is refused", "passed on"),
        "tool messages": ("The content of a tool's message is emptied", "passed on"),
        "nulls": ('`"stream": null` and `"logprobs": null` are refused', "passed on"),
        "engine options": (
            "Options that only the engine knows, or values at their edge, are refused",
            "passed on; the engine decides",
        ),
        "unknown answer fields": ("Fields that a newer engine adds to its answers are a 502", "passed on"),
        "client errors": ("What the engine refuses as 400 surfaces as 500", "the engine's status and words"),
        "bytes of bodies": (
            "Big integers, doubled keys, a byte order mark, lone surrogates or NaN are refused or written anew",
            "the body is the bytes that came",
        ),
        "shapes of prompts": (
            "Prompts as token ids, as lists of these or as lists of texts fail",
            "they are routed, each prompt by its own blocks",
        ),
        "other routes": ("Routes without messages or prompt fail inside the router", "routed by load"),
        "rerank answers": ("The engine's own shape of a rerank answer is refused", "passed on"),
        "embedding parts": ("Embedding requests of content parts are refused", "passed on"),
        "wrapped errors": ("The engine's error is wrapped into another one", "the same bytes"),
        "model list": (
            "/v1/models fails, or loses fields such as max_model_len or an adapter's parent",
            "one entry for a model, its fields kept",
        ),
        "HEAD": ("HEAD /health hangs or is a 405", "200, without a body"),
        "query strings": ("The query string is dropped or written anew", "the same bytes"),
        "multipart": ("A multipart body is read as JSON", "passed on"),
        "smuggling": (
            "What two parsers read differently is passed on, and hides a second request",
            "refused; what a replica gets has one reading",
        ),
    },
    "Connections, retries and time": {
        "stale connections": (
            "A kept connection that the replica closes as the next request arrives is an error",
            "the request is sent again on a fresh one",
        ),
        "one race, all dead": (
            "One such race counts as a failure, and takes replicas out",
            "it counts against nobody",
        ),
        "hidden pool limit": ("A client library's pool caps concurrency at 100", "400 slow streams all begin"),
        "hung replica": (
            "A replica that takes requests and never answers holds everything up, for ever",
            "it is given up within the bound and then avoided",
        ),
        "hidden timeout": (
            "A timeout that nobody set cuts long prefills",
            "one bound counts, and the error names its setting",
        ),
        "500 everywhere": (
            "A request that fails in the engine is generated again and again",
            "once more, at another replica, never after a byte was passed on",
        ),
        "429 multiplied": ("A busy engine's 429 is retried, its Retry-After lost", "passed on, one call"),
        "refused connection": ("A refused or reset connection is a bare 500", "another replica; else a 502 as JSON"),
        "429 or 503": (
            "Busy and absent are mixed up, and load alone takes replicas out",
            "503 with Retry-After when none is there; the engine's own 429 when it is busy",
        ),
        "address without scheme": ("A replica given as `gpu1:8000` fails later", "refused at the start, with a hint"),
        "answers that are no HTTP": (
            "Garbage, endless headers or two readings of one answer reach the client",
            "another replica, or a 502",
        ),
        "clients that do not read": (
            "What a client does not read is buffered without bound",
            "the replica is read no further, and in the end the client is cut",
        ),
    },
    "Cache and balance": {
        "shared system prompt": (
            "A common beginning sends every request to one replica",
            "it spreads; conversations stay where their past is",
        ),
        "affinity never begins": ("Short prompts are never remembered", "a conversation's second turn finds its first"),
        "miss goes to the idle tree": (
            "A miss goes to the replica with the least cached, however loaded it is",
            "to the one with the least to do",
        ),
        "unbounded index": ("Thousands of prompts grow the index for ever", "it is as large as the engines' pools"),
        "suffix taken for a prefix": ("Blocks that are not chained match anywhere", "only a prefix is one"),
        "equal lengths": ("Prompts of token ids and equal length look the same", "they are told apart"),
        "index outlives the cache": (
            "A replica restarts and keeps its entries in the index",
            "they are gone with the old process",
        ),
        "missed events": (
            "Cache events that were missed are not noticed, or replayed after newer ones",
            "gaps are found; replays are put in order",
        ),
        "ranks in one": ("The ranks of one replica count as one cache", "each is a cache of its own"),
        "blind routing": (
            "Hashes that do not match make every prediction wrong, and all is green",
            "one line of the log and a gauge say so",
        ),
    },
    "Prefill and decode apart": {
        "a stream for the prefill": (
            "The first leg keeps `stream` or `min_tokens`, and is refused or cannot be read",
            "it is whole and of one token; the second one is the client's to the byte",
        ),
        "ready without a role": (
            "Ready before any prefill replica is there",
            "503 that names the role, until each has been there",
        ),
        "keys lost between the legs": (
            "The client's Authorization reaches one leg, or none",
            "both carry all of the client's headers",
        ),
    },
    "Metrics and the store": {
        "renamed metrics": ("A renamed metric reads as zero", "old and new names are read, and missing ones known"),
        "slow metrics": ("A replica's slow, huge or failing /metrics holds up routing", "requests do not notice"),
        "series of the removed": (
            "A replica that was removed keeps its gauges",
            "its series go, once its answers have ended",
        ),
        "label explosion": ("Names from clients become labels", "labels are replicas and a few fixed words"),
        "series of the gone": ("Metrics of a replica that was removed stay for ever", "they go after its last answer"),
        "sums that fall": (
            "Of several workers a scrape sees one, or the sum falls when one dies",
            "whichever is asked tells of all, ended ones included",
        ),
        "hung store": (
            "A store that takes connections and never answers holds up every request",
            "each goes on by what the router knows itself",
        ),
        "log per request": ("A store that is away is a stack trace for each request", "one line for each change"),
        "forgetful restart": ("A router that restarts under load knows nothing", "it finds what it knew in the store"),
    },
}
NAMES = {name for room in FAULTS.values() for name in room}


class UnknownFaultError(Exception):
    """A test names a fault that is not in the list."""


def marked(tests: Path = ROOT / "tests") -> dict[str, list[str]]:
    """What the tests' source says: fault to tests, as `tests/wire/test_x.py::test_y`."""
    found: dict[str, set[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for name in (name for each in node.decorator_list for name in _names(each)):
                    found.setdefault(name, set()).add(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return {name: sorted(where) for name, where in found.items()}


def _names(decorator: ast.expr) -> Iterable[str]:
    for node in ast.walk(decorator):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def page(shown_by: Mapping[str, Iterable[str]]) -> str:
    """docs/conformance.md. Raises UnknownFaultError for a name that is not in the list, or a fault without a test."""
    if unknown := sorted(set(shown_by) - NAMES):
        raise UnknownFaultError(f"tests name faults that tests/faults.py does not have: {', '.join(unknown)}")
    if bare := sorted(NAMES - set(shown_by)):
        raise UnknownFaultError(f"no test shows these faults to be absent: {', '.join(bare)}")
    lines = [
        "# Conformance",
        "",
        "Made by `make conformance` from a run in which every one of these tests passed; do not edit.",
        "",
        "What goes wrong elsewhere between clients and engines, what is right, and the tests that hold this router to",
        "it. Those of the wire use raw sockets on both sides, those in `end_to_end` the official clients and fakes.",
    ]
    for room, faults in FAULTS.items():
        lines += ["", f"## {room}", "", "| fault | what goes wrong | what is right | shown by |", "|---|---|---|---|"]
        for name, (wrong, right) in faults.items():
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in sorted(set(shown_by[name])))
            lines.append(f"| {name} | {wrong} | {right} | {tests} |")
    return "\n".join(lines) + "\n"
