"""Prefill here, decode there."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_backend.engine import Engine
from fake_backend.link import Link, LinkError
from fake_backend.request import Request
from fake_backend.scheduler import SchedulerConfig
from fake_backend.timing import StepTime
from fake_backend.transfer import EngineDeathError, Transfers
from tests.fake_backend.raw import Answer, ask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from fake_backend.server import Server

ONE_SECOND = StepTime(0.0, 0.0, 0.0, 0.0, 1.0, 0.0, overhead=1.0)
TO_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
PLACE = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "P",
    "remote_request_id": "p1", "remote_host": "h", "remote_port": 1,
}  # fmt: skip
PROMPT = list(range(400, 463))


def engine(**more: Any) -> tuple[Engine, Transfers]:
    transfers = Transfers("P", Link(100.0, 1.0), 1.0, **more)
    config = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    return Engine(config, 50, ONE_SECOND, connector=transfers), transfers


def request(name: str, params: Mapping[str, Any] | None, prompt: int = 10, answer: int = 1) -> Request:
    return Request(name, prompt, answer, [hash(("x", i)) for i in range((prompt + answer) // 4)], transfer=params)


def step(engine: Engine, now: float) -> float:
    begun = engine.begin(now)
    engine.end(now if begun is None else begun.ends)
    return now if begun is None else begun.ends


class TestLink:
    def test_one_transfer_takes_latency_and_bytes(self) -> None:
        link = Link(100.0, 1.0)
        link.start("a", 200.0, 5.0)
        assert link.next_event() == 6.0
        assert link.done(6.0) == []
        assert link.next_event() == 8.0
        assert link.done(8.0) == ["a"]
        assert link.next_event() is None

    def test_two_share_the_bandwidth(self) -> None:
        link = Link(100.0, 0.0)
        link.start("a", 100.0, 0.0)
        link.start("b", 200.0, 0.0)
        assert link.done(1.9) == []
        assert link.done(2.0) == ["a"]
        assert link.next_event() == 3.0
        assert link.done(3.0) == ["b"]

    def test_a_cancelled_one_frees_its_share(self) -> None:
        link = Link(100.0, 0.0)
        link.start("a", 100.0, 0.0)
        link.start("b", 100.0, 0.0)
        link.cancel("a", 1.0)
        assert link.next_event() == 1.5
        assert link.done(1.5) == ["b"]

    @pytest.mark.parametrize(
        ("text", "bandwidth", "latency"), [("rdma", 45e9, 0.0003), ("tcp", 2.5e9, 0.001), ("10,2", 10e9, 0.002)]
    )
    def test_spellings(self, text: str, bandwidth: float, latency: float) -> None:
        link = Link.parse(text)
        assert (link.bandwidth, link.latency) == (bandwidth, latency)

    @pytest.mark.parametrize("text", ["carrier pigeon", "-1", "0,1", "5,x"])
    def test_misspellings(self, text: str) -> None:
        with pytest.raises(LinkError):
            Link.parse(text)


class TestPrefillSide:
    def test_blocks_stay_until_the_lease_ends(self) -> None:
        it, transfers = engine()
        it.add(request("p1", TO_PREFILL))
        now = step(it, 0.0)
        assert transfers.pinned == {"p1": [1, 2, 3]}
        assert it.pool.free_blocks == 46
        assert it.next_event() == now + 30.0
        step(it, now + 29.9)
        assert it.pool.free_blocks == 46
        step(it, now + 30.0)
        assert it.pool.free_blocks == 49
        assert transfers.counts.expired == 1

    def test_a_heartbeat_extends_the_lease_by_two_thirds(self) -> None:
        it, transfers = engine()
        it.add(request("p1", TO_PREFILL))
        now = step(it, 0.0)
        transfers.heartbeat("p1", now + 25.0)
        assert it.next_event() == now + 45.0

    def test_done_frees_and_a_second_done_is_late(self) -> None:
        it, transfers = engine()
        it.add(request("p1", TO_PREFILL))
        now = step(it, 0.0)
        transfers.done("p1")
        step(it, now)
        assert it.pool.free_blocks == 49
        transfers.done("p1")
        assert transfers.counts.late_notifications == 1

    def test_an_aborted_request_keeps_nothing(self) -> None:
        it, transfers = engine()
        gone = request("p1", TO_PREFILL, answer=9)
        it.add(gone)
        now = step(it, 0.0)
        it.abort(gone, now)
        assert transfers.pinned == {}
        assert it.pool.free_blocks == 49


class TestDecodeSide:
    def test_a_request_waits_for_its_blocks_and_computes_one_token(self) -> None:
        it, transfers = engine()
        here = request("d1", PLACE, prompt=10, answer=2)
        it.add(here)
        assert it.begin(0.0) is None
        (letter,) = transfers.outbox
        assert (letter.kind, letter.remote_request, letter.peer.engine_id) == ("read", "p1", "P")
        transfers.granted(here, 0.5)
        it.end(0.5)
        assert it.next_event() == 1.5  # the link's latency; then 10 tokens at 100 a second
        assert it.begin(1.5) is None
        it.end(1.5)
        assert it.next_event() == pytest.approx(1.6)
        begun = it.begin(it.next_event() or 0.0)
        assert begun is not None
        assert begun.batch.tokens == [1]
        assert here.computed == 10
        assert transfers.outbox[-1].kind == "done"
        assert (here.cached_tokens, here.external_tokens) == (10, 10)
        assert (it.scheduler.counters.external_queries, it.scheduler.counters.external_hits) == (10, 10)
        assert it.pool.lookup(here.keys, 9) == here.blocks[:2]

    def test_only_what_is_not_here_is_fetched(self) -> None:
        it, transfers = engine()
        it.add(request("local", None, prompt=9))
        now = step(it, 0.0)
        here = request("d1", PLACE, prompt=10)
        it.add(here)
        it.begin(now)
        assert (here.cached_tokens, here.external_tokens) == (10, 2)
        transfers.granted(here, now)

    @pytest.mark.parametrize("recompute", [False, True])
    def test_a_peer_that_is_not_there(self, recompute: bool) -> None:
        it, transfers = engine(recompute=recompute)
        here = request("d1", PLACE, answer=2)
        it.add(here)
        it.begin(0.0)
        transfers.denied(here, 0.0)
        it.end(0.0)
        assert it.next_event() == 5.0
        begun = it.begin(5.0)
        outcome = it.end(begun.ends if begun else 5.0)
        if recompute:
            assert begun is not None
            assert begun.batch.tokens == [10]
        else:
            assert outcome.finished == [here]
            assert here.finish_reason == "error"
            assert it.pool.free_blocks == 49
        assert transfers.counts.failed_transfers == 1

    def test_leaving_while_it_loads_tells_the_other_side(self) -> None:
        it, transfers = engine()
        here = request("d1", PLACE)
        it.add(here)
        it.begin(0.0)
        transfers.granted(here, 0.0)
        it.abort(here, 0.1)
        assert [letter.kind for letter in transfers.outbox] == ["read", "done"]
        assert it.pool.free_blocks == 49
        assert it.next_event() is None

    def test_no_block_ids_kill_the_engine(self) -> None:
        it, _transfers = engine()
        it.add(request("d1", PLACE | {"remote_block_ids": None}))
        with pytest.raises(EngineDeathError):
            it.begin(0.0)

    def test_without_a_place_it_waits_for_ever_and_an_abort_kills_the_engine(self) -> None:
        it, _transfers = engine()
        here = request("d1", {name: value for name, value in PLACE.items() if name != "remote_request_id"})
        it.add(here)
        assert it.begin(0.0) is None
        it.end(0.0)
        assert it.next_event() is None
        with pytest.raises(EngineDeathError):
            it.abort(here, 1.0)


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(
                ("prefill", "decode", "plain", "granted", "denied", "broken", "abort", "done", "heartbeat")
            ),
            st.integers(1, 20),
            st.integers(0, 5),
        ),
        max_size=40,
    ),
    recompute=st.booleans(),
)
def test_no_block_is_lost_whatever_becomes_of_transfers(events: list[tuple[str, int, int]], recompute: bool) -> None:
    it, transfers = engine(recompute=recompute)
    kinds = {"prefill": TO_PREFILL, "decode": PLACE, "plain": None}
    live: list[Request] = []
    now = 0.0
    for number, (act, size, which) in enumerate(events):
        if act in kinds:
            live.append(request(f"r{number}", kinds[act], prompt=size, answer=1 + size % 3))
            it.add(live[-1])
        elif live:
            one = live[which % len(live)]
            match act:
                case "granted":
                    transfers.granted(one, now)
                case "denied":
                    transfers.denied(one, now)
                case "broken":
                    transfers.broken(one, now)
                case "abort":
                    it.abort(one, now)
                case "done":
                    transfers.done(one.id)
                case "heartbeat":
                    transfers.heartbeat(one.id, now)
        now = step(it, now) + 0.1
        held = {block for each in live if each.finish_reason is None for block in each.blocks}
        held |= {block for blocks in transfers.pinned.values() for block in blocks}
        assert len(held) + it.pool.free_blocks <= it.pool.usable
    for _ in range(400):
        for each in live:
            transfers.denied(each, now)
        now = max(step(it, now), it.next_event() or now)
    assert it.pool.free_blocks == it.pool.usable
    assert all(each.finish_reason is not None for each in live)


def role(name: str, **more: object) -> tuple[str, ...]:
    """A hundred times faster than life; without any waiting a lease would be over at once. One lasts a minute: none
    ends here, however busy the machine."""
    lease = {"kv_connector_extra_config": {"kv_lease_duration": 6000}}
    config = {"kv_connector": "NixlConnector", "kv_role": name} | lease | more
    return "--kv-transfer-config", json.dumps(config), "--time-scale", "0.01"


async def complete(server: Server, params: object, **more: object) -> Answer:
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "kv_transfer_params": params, **more}
    return await ask(server.port, "POST", "/v1/completions", json.dumps(body).encode())


@pytest.fixture
def any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")


@pytest.mark.usefixtures("any_port")
class TestPair:
    async def test_hand_off(self, start: Callable[..., Awaitable[Server]]) -> None:
        prefill = await start(*role("kv_producer"), "--enable-prompt-tokens-details")
        decode = await start(*role("kv_consumer"), "--enable-prompt-tokens-details")
        await complete(prefill, None, max_tokens=1)
        first = json.loads((await complete(prefill, TO_PREFILL, max_tokens=1)).body)
        params = first["kv_transfer_params"]
        assert list(params) == [
            "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
            "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens",
            "remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens",
        ]  # fmt: skip
        assert (len(params["remote_block_ids"][0]), params["remote_num_tokens"]) == (4, 63)
        assert params["remote_prefill_cached_tokens"] == 48
        second = json.loads((await complete(decode, params)).body)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        assert second["usage"]["completion_tokens"] == 4
        metrics = (await ask(decode.port, "GET", "/metrics")).body.decode()
        assert (
            'vllm:prompt_tokens_by_source_total{engine="0",model_name="Qwen3-0.6B",source="external_kv_transfer"} 63.0'
            in metrics
        )
        assert (
            'vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="Qwen3-0.6B",stage="in_progress"} 0.0' in metrics
        )
        (engine,) = prefill.replica.engines
        async with asyncio.timeout(60):
            while engine.pool.free_blocks < engine.pool.usable:
                await asyncio.sleep(0.001)

    async def test_the_same_words_come_from_either_side(self, start: Callable[..., Awaitable[Server]]) -> None:
        prefill, decode = await start(*role("kv_producer")), await start(*role("kv_consumer"))
        alone = json.loads((await complete(prefill, None)).body)["choices"][0]["text"]
        params = json.loads((await complete(prefill, TO_PREFILL, max_tokens=1)).body)["kv_transfer_params"]
        assert json.loads((await complete(decode, params)).body)["choices"][0]["text"] == alone

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_dead_prefill_replica(self, start: Callable[..., Awaitable[Server]], stream: bool) -> None:
        prefill, decode = await start(*role("kv_producer")), await start(*role("kv_consumer"))
        params = json.loads((await complete(prefill, TO_PREFILL, max_tokens=1)).body)["kv_transfer_params"]
        await prefill.stop()
        answer = await complete(decode, params, stream=stream)
        if stream:
            assert answer.status == 200
            assert answer.events[-2:] == [
                b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, '
                b'"code": 500}}',
                b"data: [DONE]",
            ]
        else:
            assert (answer.status, json.loads(answer.body)["error"]["message"]) == (500, "Internal server error")
        assert (await complete(decode, None)).status == 200

    async def test_a_restarted_one_is_not_the_one_that_was_asked_for(
        self, start: Callable[..., Awaitable[Server]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill, decode = await start(*role("kv_producer")), await start(*role("kv_consumer"))
        params = json.loads((await complete(prefill, TO_PREFILL, max_tokens=1)).body)["kv_transfer_params"]
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(params["remote_port"]))
        await prefill.restart()
        assert (await complete(decode, params)).status == 500

    async def test_recompute(self, start: Callable[..., Awaitable[Server]]) -> None:
        prefill = await start(*role("kv_producer"))
        decode = await start(*role("kv_consumer", kv_load_failure_policy="recompute"))
        params = json.loads((await complete(prefill, TO_PREFILL, max_tokens=1)).body)["kv_transfer_params"]
        await prefill.stop()
        answer = await complete(decode, params)
        assert answer.status == 200
        assert json.loads(answer.body)["usage"]["completion_tokens"] == 4

    async def test_death_in_the_middle_of_a_transfer(self, start: Callable[..., Awaitable[Server]]) -> None:
        prefill = await start(*role("kv_producer"))
        # 63 tokens of 112 KiB at a megabyte a second take 7 s.
        decode = await start(*role("kv_consumer"), "--kv-link", "0.001,0", "--time-scale", "1")
        params = json.loads((await complete(prefill, TO_PREFILL, max_tokens=1)).body)["kv_transfer_params"]
        waiting = asyncio.create_task(complete(decode, params))
        link = decode.replica.ranks[0].nixl.transfers.link
        async with asyncio.timeout(60):
            while link.next_event() is None:
                await asyncio.sleep(0.001)
        await prefill.stop()
        assert (await asyncio.wait_for(waiting, 60)).status == 500

    async def test_parameters_used_twice_are_only_noticed_by_the_prefill_side(
        self, start: Callable[..., Awaitable[Server]]
    ) -> None:
        prefill = await start(*role("kv_producer"))
        decode = await start(*role("kv_consumer"), "--no-enable-prefix-caching")
        params = json.loads((await complete(prefill, TO_PREFILL, max_tokens=1)).body)["kv_transfer_params"]
        counts = prefill.replica.ranks[0].nixl.transfers.counts
        for late in (0, 1):
            assert (await complete(decode, params)).status == 200
            async with asyncio.timeout(60):
                while counts.late_notifications < late:
                    await asyncio.sleep(0.001)

    async def test_what_kills_a_real_engine_kills_this_one(self, start: Callable[..., Awaitable[Server]]) -> None:
        decode = await start(*role("kv_consumer"))
        answer = await complete(decode, PLACE | {"remote_block_ids": None})
        assert answer.status == 500
        assert json.loads(answer.body)["error"]["message"].startswith("EngineCore encountered an issue.")
        await asyncio.wait_for(decode.died.wait(), 60)
        with pytest.raises(ConnectionRefusedError):
            await ask(decode.port, "GET", "/health")

    async def test_it_can_be_kept_alive_without_an_engine(
        self, start: Callable[..., Awaitable[Server]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
        decode = await start(*role("kv_consumer"))
        await complete(decode, PLACE | {"remote_block_ids": None})
        assert (await ask(decode.port, "GET", "/health")).status == 503
        assert (await complete(decode, None)).status == 500

    async def test_a_request_turned_away_frees_what_was_kept_for_it(
        self, start: Callable[..., Awaitable[Server]]
    ) -> None:
        prefill, decode = await start(*role("kv_producer"), "--time-scale", "1"), await start(*role("kv_consumer"))
        params = json.loads((await complete(prefill, TO_PREFILL, max_tokens=1)).body)["kv_transfer_params"]
        assert len(prefill.replica.ranks[0].nixl.transfers.pinned) == 1
        assert (await complete(decode, params, temperature=-1)).status == 400
        async with asyncio.timeout(60):
            while prefill.replica.ranks[0].nixl.transfers.pinned:
                await asyncio.sleep(0.001)

    async def test_parameters_of_the_wrong_type_are_refused(self, start: Callable[..., Awaitable[Server]]) -> None:
        decode = await start(*role("kv_consumer"))
        assert (await complete(decode, "yes")).status == 400

    async def test_without_a_connector_they_are_ignored(self, start: Callable[..., Awaitable[Server]]) -> None:
        server = await start()
        answer = json.loads((await complete(server, TO_PREFILL)).body)
        assert answer["kv_transfer_params"] is None
