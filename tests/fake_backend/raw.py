"""HTTP by hand: what came over the wire, not what a client library made of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)

    @property
    def events(self) -> list[bytes]:
        """Server-sent events, each without its blank line."""
        return self.body.split(b"\n\n")[:-1]


def request(method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: fake"]
    named = {name.lower(): value for name, value in (headers or {}).items()}
    if body is not None:
        named.setdefault("content-type", "application/json")
        named["content-length"] = str(len(body))
    lines += [f"{name}: {value}" for name, value in named.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(status.split()[1]), headers


async def read_answer(reader: asyncio.StreamReader, method: str = "GET") -> Answer:
    status, headers = await read_head(reader)
    if method == "HEAD":
        return Answer(status, headers, b"")
    if "content-length" in headers:
        return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
    chunks: list[bytes] = []
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        chunks.append(await reader.readexactly(size))
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return Answer(status, headers, b"".join(chunks), chunks)


async def ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(method, path, body, headers))
        await writer.drain()
        return await read_answer(reader, method)
    finally:
        writer.close()
