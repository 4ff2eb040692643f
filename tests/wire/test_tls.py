"""TLS on both sides, mutual too, with certificates that a reload replaces; and how many connections an address has."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest

from router.app import Router
from router.config import ConfigError
from tests.wire.conftest import Bench, settings_for
from tests.wire.scripted import CHAT, STREAM_HEAD, Raw, Received, Scripted, chunk, delta, until, within

TLS = Path(__file__).parents[1] / "data" / "tls"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'


def trusting(authority: str, shown: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=TLS / f"{authority}.pem")
    if shown is not None:
        context.load_cert_chain(TLS / f"{shown}.pem", TLS / f"{shown}.key")
    return context


async def connect(router: Router, context: ssl.SSLContext) -> Raw:
    return Raw(*await asyncio.open_connection(*router.address, ssl=context, limit=2**27))


def files(directory: Path, name: str) -> dict[str, Path]:
    for end in ("pem", "key"):
        shutil.copy(TLS / f"{name}.{end}", directory / f"shown.{end}")
    return {"tls_cert_file": directory / "shown.pem", "tls_key_file": directory / "shown.key"}


async def test_clients_are_served_over_tls_and_a_stream_outlives_its_certificate(bench: Bench, tmp_path: Path) -> None:
    release = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b'"stream"' not in request.body:
            await replica._plain(request, reader, writer)
            return
        writer.write(STREAM_HEAD + chunk(delta("a")))
        await release.wait()
        writer.write(chunk(delta("b" * 1_000_000)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    replica = await bench.replica(script)
    changes = files(tmp_path, "server")
    router = await bench.router(replica, **changes)
    assert router.announcement().startswith(f"warmroute listens on https://127.0.0.1:{router.address[1]} ")
    streaming = await connect(router, trusting("server"))
    streaming.post("/v1/chat/completions", STREAM_BODY)
    assert (await streaming.head()).status == 200
    assert await streaming.chunk() == delta("a")

    files(tmp_path, "other")
    await router.reload(settings_for([replica.url], **changes))
    with pytest.raises(ssl.SSLCertVerificationError):
        await connect(router, trusting("server"))
    client = await connect(router, trusting("other"))
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).body == CHAT
    client.leave()

    (tmp_path / "shown.key").write_text("no key")
    with pytest.raises(ConfigError, match=r"--tls-key-file .*shown.key: "):
        await router.reload(settings_for([replica.url], **changes))
    client = await connect(router, trusting("other"))
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 200
    client.leave()

    release.set()
    rest = b""
    while (piece := await streaming.chunk()) is not None:
        rest += piece
    assert rest == delta("b" * 1_000_000) + b"data: [DONE]\n\n"
    streaming.leave()


async def test_a_client_that_leaves_over_tls_is_followed_and_limits_hold(bench: Bench, tmp_path: Path) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        request.aborted.set()
        raise ConnectionError

    replica = await bench.replica(script)
    router = await bench.router(replica, **files(tmp_path, "server"), max_body_bytes=1024)
    client = await connect(router, trusting("server"))
    client.post("/v1/chat/completions", STREAM_BODY)
    await until(lambda: len(replica.received) == 1, "the replica has it")
    client.leave()
    await within(replica.received[0].aborted.wait())
    client = await connect(router, trusting("server"))
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2048\r\n\r\n")
    assert (await client.reply()).status == 413
    client.leave()


async def test_only_clients_with_a_certificate_may_connect(bench: Bench, tmp_path: Path) -> None:
    replica = await bench.replica()
    changes = {**files(tmp_path, "server"), "tls_client_ca_file": TLS / "other.pem"}
    router = await bench.router(replica, **changes)

    async def status(shown: str | None) -> int | None:
        try:
            client = await connect(router, trusting("server", shown))
            client.post("/v1/chat/completions", BODY)
            reply = await client.reply()
        except (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
            return None
        client.leave()
        return reply.status

    assert [await status("other"), await status("server"), await status(None)] == [200, None, None]
    # Whoever was vouched for yesterday is not today.
    await router.reload(settings_for([replica.url], **changes | {"tls_client_ca_file": TLS / "server.pem"}))
    assert [await status("other"), await status("server"), await status(None)] == [None, 200, None]
    assert len(replica.received) == 2


class Secure(Scripted):
    """A replica behind TLS."""

    context: ssl.SSLContext

    @property
    def url(self) -> str:
        return f"https://{self.name}"

    async def start(self) -> Secure:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**27, ssl=self.context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self


async def secure(shown: str, client: str | None = None) -> Secure:
    replica = Secure()
    replica.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    replica.context.load_cert_chain(TLS / f"{shown}.pem", TLS / f"{shown}.key")
    if client is not None:
        replica.context.load_verify_locations(TLS / f"{client}.pem")
        replica.context.verify_mode = ssl.CERT_REQUIRED
    return await replica.start()


async def test_replicas_are_verified_and_shown_a_certificate(bench: Bench) -> None:
    replica = await secure("server", client="other")
    changes = {
        "replica_ca_file": TLS / "server.pem",
        "replica_cert_file": TLS / "other.pem",
        "replica_key_file": TLS / "other.key",
    }
    router = await bench.router(replica, **changes)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).body == CHAT
    assert replica.probes
    await replica.stop()


async def test_a_replica_that_nobody_vouches_for_gets_no_request_until_a_reload_does(bench: Bench) -> None:
    replica = await secure("server")
    router = await bench.router(replica, probe_seconds=0.05)
    assert router.fleet.ready() == []
    assert router.fleet[replica.name].why == (
        "nobody that is trusted here vouches for it: self-signed certificate (replica_ca_file)"
    )
    await router.reload(settings_for([replica.url], replica_ca_file=TLS / "server.pem"))
    await until(lambda: len(router.fleet.ready()) == 1, "it is trusted now")
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).body == CHAT
    await replica.stop()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tls_cert_file": TLS / "absent.pem"}, "--tls-cert-file .*absent.pem: no such file or directory"),
        ({"tls_key_file": TLS / "server.key"}, "--tls-cert-file is not given"),
        (
            {"tls_cert_file": TLS / "server.pem", "tls_key_file": TLS / "other.key"},
            "--tls-cert-file .*server.pem, --tls-key-file .*other.key: key values mismatch",
        ),
        ({"tls_cert_file": TLS / "make.sh"}, "--tls-cert-file .*make.sh: "),
        ({"replica_ca_file": TLS / "make.sh"}, "--replica-ca-file .*make.sh: "),
        ({"replica_key_file": TLS / "other.key"}, "--replica-key-file .*other.key: without a certificate"),
    ],
)
def test_files_that_make_no_sense_end_the_start(changes: dict[str, Path], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i)^{said}"):
        Router(settings_for(["http://127.0.0.1:1"], **changes))


# -- connections of one address -------------------------------------------------------------------------------------


async def test_one_address_may_have_so_many_connections(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica, max_connections_per_address=2)
    one, two = [await bench.client(router) for _ in range(2)]
    for client in (one, two):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).status == 200
    third = await bench.client(router)
    refused = await third.reply()
    assert (refused.status, refused.header(b"retry-after")) == (429, b"1")
    assert b"max_connections_per_address" in refused.body
    third.leave()
    two.leave()
    assert router.door is not None
    await until(lambda: router.door.addresses == {"127.0.0.1": 1}, "two have left")
    fourth = await bench.client(router)
    fourth.post("/v1/chat/completions", BODY)
    assert (await fourth.reply()).status == 200
    for client in (one, fourth):
        client.leave()
    await until(lambda: not router.door.addresses, "nothing is counted of those who left")
