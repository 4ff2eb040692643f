"""One of several workers that serve one port, as seen from inside it: where it stands and whom it tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from router.config import Settings

# The supervisor answers at once; what takes this long is not coming.
ASK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """`number`: from 1. `directory`: where the sockets of the supervisor and of all workers lie; only this user can
    enter it."""

    number: int
    directory: Path

    @property
    def socket(self) -> str:
        return socket_of(self.directory, self.number)

    def settings(self) -> Settings:
        """The part for one worker of the settings that the supervisor has found to make sense."""
        return share(msgspec.json.decode(_file(self.directory).read_bytes(), type=Settings))

    async def tell_ready(self, announcement: str) -> None:
        """Tell the supervisor that this worker serves, and what it has to say of the fleet."""
        await self._ask("POST", f"/workers/{self.number}/ready", announcement.encode())

    async def metrics(self) -> bytes:
        """The metrics of all workers together. Raises OSError where the supervisor does not answer."""
        return await self._ask("GET", "/metrics")

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        return await ask(socket_of(self.directory, 0), method, path, body)


def write_settings(directory: Path, settings: Settings) -> None:
    """What workers go by from now on, those that are started later too, whatever the user's file says by then."""
    unfinished = directory / "settings.new"
    unfinished.write_bytes(msgspec.json.encode(settings))
    unfinished.replace(_file(directory))


def _file(directory: Path) -> Path:
    return directory / "settings.json"


def socket_of(directory: Path, number: int) -> str:
    """A worker's own socket; 0 is the supervisor's."""
    return str(directory / f"{number}.sock")


async def ask(socket: str, method: str, path: str, body: bytes | None = None) -> bytes:
    """Ask whoever listens on a unix socket. Raises OSError for any answer but 200."""
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(socket), timeout=aiohttp.ClientTimeout(total=ASK_SECONDS)
            ) as session,
            session.request(method, f"http://worker{path}", data=body) as answer,
        ):
            said = await answer.read()
            if answer.status != 200:
                raise OSError(f"{path} answered {answer.status}")
            return said
    except (aiohttp.ClientError, TimeoutError) as error:
        raise OSError(str(error) or type(error).__name__) from None


def share(settings: Settings) -> Settings:
    """A worker's part of what the settings allow the whole router to hold."""
    listen, prompt, workers = settings.listen, settings.prompt, settings.listen.workers
    return msgspec.structs.replace(
        settings,
        listen=msgspec.structs.replace(
            listen,
            max_connections=max(1, listen.max_connections // workers),
            max_buffered_bytes=max(listen.max_body_bytes, listen.max_buffered_bytes // workers),
        ),
        prompt=msgspec.structs.replace(prompt, prompt_memory_bytes=prompt.prompt_memory_bytes // workers),
    )
