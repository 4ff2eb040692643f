"""One connection to Redis or Valkey: commands are written at once and answered in order. The I/O of the shared index.

All keys of the index lie in one hash slot, so that one connection, to the node that holds the slot, is all it takes
of a cluster. A library's client costs about as much CPU per call as the whole decision.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import hiredis

from router.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.names import Name

DEFAULT_PORT = 6379
_MISSING = object()


class LinkError(Exception):
    """The connection cannot be used: refused, lost, or too slow. The message says which, for people."""


class RefusedError(Exception):
    """The server answered with an error: its own words."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is and how to enter. `path` is a unix socket's."""

    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    tls: bool = False
    user: str = ""
    password: str = ""
    database: int = 0

    def __str__(self) -> str:
        """For people and logs: never with the password."""
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}"

    def __repr__(self) -> str:
        return f"Target({self})"


def parse_targets(url: str, password: str = "") -> list[Target]:
    """redis://, rediss:// (TLS) or unix:///path; several hosts of a cluster as redis://a:6379,b:6379. `password` is
    what a file told and goes before the URL's. Raises ConfigError, which never shows the password."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError("redis: the URL must begin with redis://, rediss:// or unix://, or be `embedded`")
    query = parse_qs(parts.query)
    unknown = sorted(set(query) - {"db"})
    if unknown:
        raise ConfigError(f"redis: `?{unknown[0]}=` is not known; only `?db=` is")
    entry, _, where = parts.netloc.rpartition("@")
    user, _, secret = entry.partition(":")
    database = query.get("db", [""])[0] or (parts.path.strip("/") if parts.scheme != "unix" else "")
    if database and not database.isdecimal():
        raise ConfigError(f"redis: the database must be a number, not `{database}`")
    common = Target(
        tls=parts.scheme == "rediss",
        user=unquote(user),
        password=password or unquote(secret),
        database=int(database or 0),
    )
    if parts.scheme == "unix":
        if not parts.path.startswith("/") or where:
            raise ConfigError("redis: a unix socket is given as unix:///run/redis.sock")
        return [replace(common, path=unquote(parts.path))]
    targets = []
    for each in where.split(","):
        try:
            one = urlsplit(f"//{each}")
            host, port = one.hostname, one.port
        except ValueError:
            raise ConfigError(f"redis: `{each}` is no host and port") from None
        if not host:
            raise ConfigError("redis: the URL names no host")
        targets.append(replace(common, host=host, port=port or DEFAULT_PORT))
    return targets


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Verifies the server's certificate, by the system's authorities or those of a file. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"redis_ca_file {ca_file}: {error.strerror or error}") from None


def read_password(file: str) -> str:
    """Raises ConfigError."""
    if not file:
        return ""
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        raise ConfigError(f"redis_password_file {file}: {error.strerror}") from None


class Link(asyncio.Protocol):
    """An open connection. `lost` is called once, with why, when it cannot be used any more."""

    def __init__(self) -> None:
        self.lost: Callable[[str], None] | None = None
        self._reader = hiredis.Reader(notEnoughData=_MISSING)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._transport: asyncio.Transport | None = None
        self._closed = False

    @classmethod
    async def connect(cls, target: Target, context: ssl.SSLContext | None, name: Name | None = None) -> Link:
        """Connect and enter. Raises LinkError; bound it by a time-out. `name`: what resolves the target's host."""
        where = target.host
        loop = asyncio.get_running_loop()
        link: Link
        try:
            if target.path:
                _, link = await loop.create_unix_connection(cls, target.path)
            else:
                if name is not None:
                    where = await name.resolve()
                _, link = await loop.create_connection(
                    cls,
                    where,
                    target.port,
                    ssl=context if target.tls else None,
                    server_hostname=target.host if target.tls else None,
                )
        except OSError as error:
            if name is not None:
                name.doubt(where)
            reason = error.strerror or str(error) or type(error).__name__
            raise LinkError(reason.lower() if isinstance(error, ConnectionError) else reason) from None
        try:
            if target.password:
                await link.call(b"AUTH", *([target.user.encode()] if target.user else []), target.password.encode())
            if target.database:
                await link.call(b"SELECT", b"%d" % target.database)
        except RefusedError as error:
            link.close()
            raise LinkError(str(error)) from None
        except BaseException:
            link.close()
            raise
        return link

    def call(self, *command: bytes) -> asyncio.Future[Any]:
        """The answer to one command. The future raises RefusedError for an error and LinkError for a lost connection;
        it may be cancelled at any time, the connection stays usable."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._closed or self._transport is None:
            future.set_exception(LinkError("the connection is closed"))
            return future
        self._waiting.append(future)
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]
        return future

    @property
    def closed(self) -> bool:
        return self._closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is none by inheritance
        held = transport.get_extra_info("socket")
        if held is not None and held.family in (socket.AF_INET, socket.AF_INET6):
            held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _MISSING:
                future = self._waiting.popleft()
                if future.done():
                    continue
                if isinstance(reply, hiredis.ReplyError):
                    future.set_exception(RefusedError(str(reply)))
                else:
                    future.set_result(reply)
        except (hiredis.ProtocolError, IndexError):
            self.close("it does not speak Redis's protocol")

    def connection_lost(self, exc: Exception | None) -> None:
        self.close("the connection was lost" if exc is None else f"the connection was lost: {exc}")

    def close(self, why: str = "closed") -> None:
        """Give the connection up, and with it all that still waits for an answer."""
        if self._closed:
            return
        self._closed = True
        if self._transport is not None:
            self._transport.abort()
        for future in self._waiting:
            if not future.done():
                future.set_exception(LinkError(why))
                future.exception()  # seen: nobody may be waiting any more
        self._waiting.clear()
        if self.lost is not None:
            self.lost(why)
