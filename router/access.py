"""The access log: one JSON object for each request, written by a thread, so that no disk holds a stream up."""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson

from router.config import ConfigError
from router.listening import reason
from router.tracing import read

if TYPE_CHECKING:
    from router.trail import Trail
    from router.wire.front import Front
    from router.wire.http import Request

log = logging.getLogger("warmroute.access")

# What waits to be written; beyond it lines are dropped and counted. About 20,000 requests.
MAX_HELD_BYTES = 8 * 1024 * 1024
# Lines are gathered this long: a thread that is woken for each of them would cost more than writing it.
GATHER_SECONDS = 0.2
CLOSE_SECONDS = 2.0
# What a client chooses is cut to this many characters.
LONGEST = 256
STANDARD_OUTPUT = 1


def line(request: Request, client: Front, trail: Trail, *, now: float) -> bytes:
    """What is told of a request. Never its prompt, its answer, a key or a query; `now` in unix seconds."""
    context = read(request.header(b"traceparent"))
    said: dict[str, object] = {
        "time": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
        "request_id": _short(request.id),
        "trace_id": context.trace if context is not None else None,
        "client": client.peer,
        "key": request.key or None,
        "method": request.method.decode("latin-1"),
        "path": request.path[:LONGEST],
        "model": None if trail.model is None else trail.model[:LONGEST].encode("utf-8", "replace").decode(),
        "stream": trail.stream,
        "status": trail.status or None,
        "ending": trail.ending,
        "attempts": len(trail.tried),
        "duration_ms": round((trail.ended - trail.began) * 1000, 3),
        "bytes_in": len(request.body),
        "bytes_out": client.sent,
    }
    if trail.legs:
        leg = trail.legs[-1]
        answer = leg.answer()
        first = trail.first_token_at
        said["replica"] = leg.placement.replica.name
        if leg.prefilled is not leg.placement:
            said["prefill"] = leg.prefilled.replica.name
        said["prompt_tokens"] = sum(leg.prompt.tokens)
        said["predicted_cached_tokens"] = leg.prefilled.hit
        said["cached_tokens"] = answer.cached_tokens if answer is not None else None
        said["completion_tokens"] = answer.completion_tokens if answer is not None else None
        said["ttft_ms"] = None if first is None else round((first - trail.began) * 1000, 3)
    return orjson.dumps(said) + b"\n"


def refused_line(client: Front, status: int, *, now: float) -> bytes:
    """What is told of what was refused before it was a whole request."""
    return (
        orjson.dumps(
            {
                "time": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
                "client": client.peer,
                "path": client.path[:LONGEST] or None,
                "status": status,
                "ending": "refused",
            }
        )
        + b"\n"
    )


def _short(value: bytes) -> str:
    return value[:LONGEST].decode("latin-1")


class AccessLog:
    """`path`: a file that lines are appended to, or "-" for standard output."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError where it cannot be opened."""
        self.path = path
        self.dropped = 0
        """Lines that found no room, here or on the disk."""
        self._file = _opened(path)
        self._lines: list[bytes] = []
        self._held = 0
        self._lock = threading.Lock()  # held for moments only, by either side
        self._torn = False  # the last line on the disk has no end
        self._failing = False
        self._reopen = self._ending = False
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
        self._thread.start()

    def write(self, text: bytes) -> None:
        """Never waits."""
        with self._lock:
            if self._held + len(text) > MAX_HELD_BYTES:
                self.dropped += 1
                return
            self._lines.append(text)
            self._held += len(text)

    def reopen(self) -> None:
        """The file was moved away: go on in a new one at the same place."""
        self._reopen = True
        self._now.set()

    def close(self) -> None:
        """Write what is left, as far as that goes quickly."""
        self._ending = True
        self._now.set()
        self._thread.join(CLOSE_SECONDS)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending:
            self._now.wait(GATHER_SECONDS)
            self._now.clear()
            self._write_all()
            if self._reopen:
                self._reopen = False
                self._open_anew()
        self._write_all()
        if self._file != STANDARD_OUTPUT:
            os.close(self._file)

    def _open_anew(self) -> None:
        try:
            fresh = _opened(self.path)
        except ConfigError as error:
            log.error("%s; going on in the old file", error)
            return
        if self._file != STANDARD_OUTPUT:
            os.close(self._file)
        self._file, self._torn = fresh, False

    def _write_all(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        if not lines:
            return
        rest = memoryview((b"\n" if self._torn else b"") + b"".join(lines))
        try:
            while rest:
                written = os.write(self._file, rest)
                self._torn = bytes(rest[written - 1 : written]) != b"\n"
                rest = rest[written:]
        except OSError as error:
            with self._lock:
                self.dropped += bytes(rest).count(b"\n")
            if not self._failing:
                self._failing = True
                log.error("access log %s: %s; lines are dropped until it goes again", self.path, reason(error))
            time.sleep(GATHER_SECONDS)
        else:
            if self._failing:
                self._failing = False
                log.warning("access log %s is written again; dropped so far: %d", self.path, self.dropped)
        with self._lock:
            self._held -= sum(map(len, lines))


def _opened(path: str) -> int:
    if path == "-":
        return STANDARD_OUTPUT
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise ConfigError(f"--access-log {path}: {reason(error)}") from None
