"""API keys of clients: who may enter, what of it is passed on, and that a key is never told."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from router.app import Router
from router.config import ConfigError
from router.wire.keys import Keys, KeysError
from tests.wire.conftest import Bench, settings_for
from tests.wire.scripted import CHAT

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
SECRET = "sk-of-a-client"
HASHED = "sk-kept-as-a-hash"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    digest = hashlib.sha256(HASHED.encode()).hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# those who may enter\n\n{SECRET}\nteam-a:{digest}\n")
    return file


@pytest.mark.parametrize(
    "header",
    [f"Authorization: Bearer {SECRET}", f"authorization: bearer  {HASHED}", f"x-api-key: {HASHED}"],
    ids=["as it is", "hashed", "as the Anthropic client sends it"],
)
async def test_a_known_key_enters_and_ends_at_the_router(bench: Bench, keys_file: Path, header: str) -> None:
    replica = await bench.replica()
    router = await bench.router(replica, client_keys_file=keys_file)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY, header.encode() + b"\r\n")
    assert (await client.reply()).body == CHAT
    assert SECRET.encode() not in replica.received[0].head
    assert HASHED.encode() not in replica.received[0].head
    assert replica.received[0].header(b"authorization") is None


async def test_the_replicas_get_the_routers_key_in_its_place(bench: Bench, keys_file: Path, tmp_path: Path) -> None:
    (tmp_path / "replica-key").write_text("sk-of-the-replicas\n")
    replica = await bench.replica()
    router = await bench.router(replica, client_keys_file=keys_file, api_key_file=tmp_path / "replica-key")
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY, f"Authorization: Bearer {SECRET}\r\n".encode())
    assert (await client.reply()).body == CHAT
    assert replica.received[0].head.lower().count(b"authorization:") == 1
    assert replica.received[0].header(b"authorization") == b"Bearer sk-of-the-replicas"
    assert replica.probes[0].header(b"authorization") == b"Bearer sk-of-the-replicas"


async def test_without_keys_a_clients_authorization_passes_through(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "replica-key").write_text("sk-of-the-replicas\n")
    replica = await bench.replica()
    router = await bench.router(replica, api_key_file=tmp_path / "replica-key")
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY, f"Authorization: Bearer {SECRET}\r\n".encode())
    assert (await client.reply()).body == CHAT
    assert replica.received[0].header(b"authorization") == f"Bearer {SECRET}".encode()


async def test_where_the_replicas_judge_keys_they_also_judge_who_is_told_their_models(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "replica-key").write_text("sk-of-the-replicas\n")
    replicas = [await bench.replica() for _ in range(2)]
    for replica, model in zip(replicas, ("m", "other"), strict=True):
        replica.models = [{"id": model}]
    router = await bench.router(*replicas, api_key_file=tmp_path / "replica-key", probe_seconds=60)
    client = await bench.client(router)
    client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-guessed\r\n\r\n")
    assert (await client.reply()).status == 200
    asked = [probe.header(b"authorization") for replica in replicas for probe in replica.probes]
    assert asked.count(b"Bearer sk-guessed") == 1


@pytest.mark.parametrize(
    ("line", "header"),
    [
        ("POST /v1/chat/completions", ""),
        ("POST /v1/chat/completions", "Authorization: Bearer sk-guessed\r\n"),
        ("POST /v1/chat/completions", f"Authorization: {HASHED[:-1]}\r\n"),
        ("POST /v1/chat/completions", "Authorization:\r\n"),
        ("POST /v1/chat/completions", "Authorization: Bearer \xff\r\n"),
        ("POST /invocations", ""),
        ("POST /tokenize", ""),
        ("GET /v1/models", ""),
        ("POST /health", ""),
        ("GET /health/../v1/models", ""),
        ("GET http://x/health", ""),
    ],
)
async def test_a_stranger_is_refused_in_vllms_words_before_the_body(
    bench: Bench, keys_file: Path, line: str, header: str
) -> None:
    replica = await bench.replica()
    router = await bench.router(replica, client_keys_file=keys_file)
    client = await bench.client(router)
    client.send(f"{line} HTTP/1.1\r\nHost: x\r\n{header}Content-Length: 1000000\r\n\r\n".encode("latin-1"))
    reply = await client.reply()
    assert (reply.status, reply.body) == (401, b'{"error":"Unauthorized"}')
    assert reply.header(b"content-type") == b"application/json"
    assert reply.header(b"www-authenticate") == b"Bearer"
    assert router.door is not None
    assert router.door.held_bytes == 0
    assert replica.received == []
    assert b'warmroute_requests_total{code="4xx",ending="refused"} 1.0' in router.telemetry.page()


async def test_probes_and_preflights_need_no_key(bench: Bench, keys_file: Path) -> None:
    replica = await bench.replica()
    router = await bench.router(replica, client_keys_file=keys_file)
    client = await bench.client(router)
    for path in ("/health", "/ready?verbose", "/metrics"):
        client.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await client.reply()).status == 200
    client.send(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\n\r\n")
    assert (await client.reply()).status == 200
    assert [request.line for request in replica.received] == [b"OPTIONS /v1/chat/completions HTTP/1.1"]


async def test_a_key_stands_for_its_own_request_only(bench: Bench, keys_file: Path) -> None:
    """The next request on the same connection has to bring one again."""
    replica = await bench.replica()
    router = await bench.router(replica, client_keys_file=keys_file)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY, f"Authorization: Bearer {SECRET}\r\n".encode())
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 200
    assert (await client.reply()).status == 401
    assert len(replica.received) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no key"),
        ("# nobody\n", "it has no key"),
        ("sk-a\nsk b\n", "line 2 is neither a key nor NAME:SHA256"),
    ],
)
def test_a_file_that_makes_no_sense_ends_the_start(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError) as error:
        Router(settings_for(["http://127.0.0.1:1"], client_keys_file=tmp_path / "keys"))
    assert str(error.value) == f"--client-keys-file {tmp_path / 'keys'}: {said}"
    assert "sk" not in str(error.value).replace(str(tmp_path), "")


def test_names_are_told_and_keys_are_not() -> None:
    keys = Keys([f"{'team'}:sha256:{hashlib.sha256(HASHED.encode()).hexdigest()}", SECRET])
    assert len(keys) == 2
    headers = [(b"Host", b"x"), (b"Authorization", f"Bearer {HASHED}".encode())]
    assert keys.admit(b"POST", b"/v1/completions", headers) == ("team", [(b"Host", b"x")])
    assert keys.admit(b"POST", b"/v1/completions", [(b"X-Api-Key", SECRET.encode())]) == ("line 2", [])
    assert SECRET not in repr(vars(keys))
    with pytest.raises(KeysError):
        Keys([])
