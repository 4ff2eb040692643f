"""Roles as settings give them and replicas show them, and who says so."""

from __future__ import annotations

import aiohttp
import pytest

from router.app import Router
from router.config import ConfigError, load
from router.fleet.links import told
from tests.wire.conftest import Bench
from tests.wire.scripted import Scripted, until

PRODUCER = b'process_start_time_seconds 1.0\nvllm:nixl_num_kv_expired_reqs_total{engine="0"} 0.0\n'
CONSUMER = PRODUCER + b'vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 0.0\n'
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


async def away(bench: Bench) -> Scripted:
    replica = await bench.replica()
    await replica.stop()
    return replica


@pytest.mark.fault("ready without a role")
async def test_not_ready_before_every_role_is_there(bench: Bench) -> None:
    """Ready with decode replicas alone, a router would be sent traffic that its fleet is not yet made for."""
    prefill, decode = await away(bench), await bench.replica()
    router = await bench.router(prefill=prefill.url, decode=decode.url, probe_seconds=0.02)
    client = await bench.client(router)
    client.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    reply = await client.reply()
    assert reply.status == 503
    why = f"no replica for prefill is ready: {prefill.name}: not reached yet (connection refused)"
    assert reply.json == {"ready": False, "missing": [why]}
    await prefill.start()
    await until(lambda: router.fleet.missing() == [], "the prefill replica is seen")
    client.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    reply = await client.reply()
    assert (reply.status, reply.json) == (200, {"ready": True, "missing": []})


async def test_a_role_that_is_lost_is_told_and_requests_go_on(bench: Bench) -> None:
    prefill, decode = await bench.replica(), await bench.replica()
    router = await bench.router(prefill=prefill.url, decode=decode.url, probe_seconds=0.02)
    await until(lambda: len(router.fleet.ready()) == 2, "both are ready")
    assert router.fleet.missing() == []
    await prefill.stop()
    await until(lambda: len(router.fleet.ready()) == 1, "one is lost")
    client = await bench.client(router)
    client.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    reply = await client.reply()
    assert reply.status == 200
    (line,) = reply.json["missing"]  # type: ignore[misc]
    assert line.startswith(f"no replica for prefill is ready: {prefill.name}: lost")
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 200


async def test_roles_are_shown_where_people_look(bench: Bench) -> None:
    producer, consumer, both = [await bench.replica() for _ in range(3)]
    producer.metrics, consumer.metrics = PRODUCER, CONSUMER
    router = await bench.router(producer, consumer, prefill=both.url, decode=both.url, admin_port=0)
    await until(lambda: len(router.fleet.ready()) == 3, "all are ready")
    assert router.admin_address is not None
    async with aiohttp.ClientSession() as session:
        host, port = router.admin_address
        async with session.get(f"http://{host}:{port}/router/replicas") as answer:
            told = {each["replica"]: each["role"] for each in (await answer.json())["replicas"]}
    assert told == {producer.name: "prefill", consumer.name: "decode", both.name: "both"}
    lines = [line.strip() for line in router.announcement().splitlines()]
    for name, does in ((producer.name, "prefill"), (consumer.name, "decode"), (both.name, "prefill and decode")):
        assert any(line.startswith(f"{name} ({does})  ready") for line in lines)


async def test_whole_requests_stay_away_from_prefill_replicas(bench: Bench) -> None:
    prefill, decode = await bench.replica(), await bench.replica()
    router = await bench.router(prefill=prefill.url, decode=decode.url, probe_seconds=60)
    await until(lambda: len(router.fleet.ready()) == 2, "both are ready")
    client = await bench.client(router)
    for path in ("/v1/embeddings", "/v1/responses", "/v1/whatever"):
        client.post(path, b'{"model":"m","input":"hello"}')
        assert (await client.reply()).header(b"x-warmroute-replica") == decode.name.encode()
    await decode.stop()
    client.post("/v1/responses", b'{"model":"m","input":"hello"}')
    assert (await client.reply()).header(b"x-warmroute-replica") == prefill.name.encode()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prefill": "gpu1:8000"}, "--prefill: replica `gpu1:8000` has no scheme; did you mean `http://gpu1:8000`?"),
        ({"decode": "http://a:1 http://a:1/"}, "--decode: replica http://a:1/ is given twice (as http://a:1)"),
        ({"connector": "pigeon"}, "--connector pigeon: must be auto, nixl, nixl_push, mooncake or content"),
    ],
)
def test_wrong_settings(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags=flags, environ={})
    assert str(caught.value) == message


@pytest.mark.parametrize("link", ["pigeon", "0", "-1", "inf", "1,x", "1,-2", "nan"])
def test_a_link_that_cannot_be(link: str) -> None:
    settings = load(replicas=["http://a:1"], flags={"kv_link": link}, environ={})
    with pytest.raises(ConfigError) as caught:
        Router(settings)
    assert str(caught.value) == f"--kv-link {link}: must be rdma, tcp, or GB/s and perhaps ms, as 12,0.5"


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency", "fast"),
    [
        ("rdma", 45e9, 0.0003, True),
        ("tcp", 2.5e9, 0.001, False),
        ("", 2.5e9, 0.001, False),
        ("12,0.5", 12e9, 0.0005, True),
        ("1", 1e9, 0.001, False),
    ],
)
def test_what_is_told_of_a_link(text: str, bandwidth: float, latency: float, fast: bool) -> None:
    link = told(text)
    assert (link.bandwidth, link.latency, link.fast) == (bandwidth, latency, fast)
    # What is told to be RDMA, or not to be, stays so whatever is measured; else the measurement decides.
    link.observe(20e9, 1.0)
    assert link.fast is (text != "tcp")


def test_a_fleet_of_roles_needs_no_other_list() -> None:
    settings = load(flags={"prefill": "http://a:1, http://b:1", "decode": "http://c:1"}, environ={})
    assert settings.replicas == []
