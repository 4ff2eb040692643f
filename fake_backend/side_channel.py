"""What prefill and decode replicas say to each other: JSON lines over TCP, where NIXL has its own handshake.

{"op": "read", "engine": id, "request": id}    -> {"ok": bool}; the connection stays open while blocks are read
{"op": "heartbeat", "request": id}             the decode replica still wants them
{"op": "done", "request": id}                  it has them, or doesn't want them any more
"""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress

from fake_backend.transfer import Letter, Peer, Transfers

log = logging.getLogger("fake_backend")


class SideChannel:
    """The prefill side's listener."""

    def __init__(self, transfers: Transfers, host: str, port: int, now: Callable[[], float], nudge: Callable[[], None]):
        self._transfers = transfers
        self._now = now
        self._nudge = nudge
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.host = host
        self.port = port
        """The port in use; 0 is replaced by the one the system gave."""

    async def open(self) -> None:
        """Listen. Raises OSError if the address is taken."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and leave every reader in the middle of what it was reading."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                message = json.loads(line)
                request = str(message["request"])
                match message["op"]:
                    case "read":
                        same = message["engine"] == self._transfers.engine_id
                        if same and not self._transfers.read(request):
                            log.warning("Potentially invalid KV blocks for unrecognized request %s", request)
                        writer.write(json.dumps({"ok": same}).encode() + b"\n")
                    case "heartbeat":
                        self._transfers.heartbeat(request, self._now())
                    case "done":
                        self._transfers.done(request)
                self._nudge()
        except (ConnectionError, ValueError, KeyError) as error:
            log.debug("side channel: %s", error)
        finally:
            self._writers.discard(writer)
            writer.close()


class Courier:
    """The decode side: carries the letters of :attr:`Transfers.outbox`, and keeps leases alive."""

    def __init__(self, transfers: Transfers, now: Callable[[], float], nudge: Callable[[], None], scale: float):
        self._transfers = transfers
        self._now = now
        self._nudge = nudge
        self._beat = transfers.lease / 6 * scale
        self._reading: dict[str, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def deliver(self) -> None:
        """Send what lies in the outbox."""
        letters, self._transfers.outbox = self._transfers.outbox, []
        for letter in letters:
            self._spawn(self._read(letter) if letter.kind == "read" else self._done(letter))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, letter: Letter) -> None:
        """Ask for blocks, then watch the connection until they are read."""
        request = letter.request
        assert request is not None
        try:
            reader, writer = await asyncio.open_connection(letter.peer.host, letter.peer.port)
            writer.write(_line("read", letter.remote_request, letter.peer))
            answer = await reader.readline()
            if not json.loads(answer or b"{}").get("ok"):
                raise ConnectionError(f"{letter.peer.host}:{letter.peer.port} is not engine {letter.peer.engine_id}")
        except (OSError, ValueError) as error:
            log.warning("KV transfer of %s failed: %s", request.id, error)
            self._transfers.denied(request, self._now())
            self._nudge()
            return
        self._reading[letter.remote_request] = writer
        self._transfers.granted(request, self._now())
        self._nudge()
        try:
            while True:
                try:
                    gone = not await asyncio.wait_for(reader.read(1), self._beat or None)
                except TimeoutError:
                    if not writer.is_closing():
                        writer.write(_line("heartbeat", letter.remote_request))
                        continue
                    gone = True  # it was said that the blocks may go
                except ConnectionError:
                    gone = True
                if gone:
                    break
        finally:
            writer.close()
        if self._reading.pop(letter.remote_request, None) is not None:
            log.warning("KV transfer of %s broke off: the prefill replica is gone", request.id)
            self._transfers.broken(request, self._now())
            self._nudge()

    async def _done(self, letter: Letter) -> None:
        writer = self._reading.pop(letter.remote_request, None)
        try:
            if writer is None:
                _reader, writer = await asyncio.open_connection(letter.peer.host, letter.peer.port)
            writer.write(_line("done", letter.remote_request))
            await writer.drain()
            writer.close()
        except OSError as error:
            log.warning("could not tell %s:%d that it may free blocks: %s", letter.peer.host, letter.peer.port, error)


def _line(operation: str, request: str, peer: Peer | None = None) -> bytes:
    message = {"op": operation, "request": request}
    if peer is not None:
        message["engine"] = peer.engine_id
    return json.dumps(message).encode() + b"\n"
