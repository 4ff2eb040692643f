"""Whatever goes wrong with a split, the client gets the whole answer, and no prefill replica keeps blocks for long.

Every failure that vLLM's NIXL connector has been seen to have, on fakes that have them too; streamed and whole, with
one replica of each role and with two.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from fake_backend.faults import read_rule
from fake_backend.server import Server
from router.app import Router
from tests.end_to_end.conftest import Fleet
from tests.handoff.pairs import LASTING, SHORT, chat, completion, consumer, nothing_pinned, producer, text, transfers
from tests.wire.scripted import until

pytestmark = pytest.mark.usefixtures("pairs")


@dataclass
class Site:
    """Two replicas of each role, the second ones down where a cell wants to be alone with the first."""

    prefills: list[Server]
    decodes: list[Server]
    router: Router

    @property
    def prefill(self) -> Server:
        return self.prefills[0]

    @property
    def decode(self) -> Server:
        return self.decodes[0]


Arrange = Callable[[Site], Awaitable[None]]


def fault(role: str, **rule: Any) -> Arrange:
    async def arrange(site: Site) -> None:
        for fake in site.prefills if role == "prefill" else site.decodes:
            fake.faults.add(read_rule({"times": 1, **rule}))

    return arrange


async def first_prefill_refuses(site: Site) -> None:
    await fault("prefill", kind="status", status=503)(Site([site.prefill], [], site.router))


async def stop_prefill(site: Site) -> None:
    for fake in site.prefills:
        await fake.listener.close()


async def stop_first_decode(site: Site) -> None:
    await site.decode.listener.close()


async def first_decode_is_busy(site: Site) -> None:
    await fault("decode", kind="status", status=503)(Site([], [site.decode], site.router))


async def first_decode_resets(site: Site) -> None:
    await fault("decode", kind="reset")(Site([], [site.decode], site.router))


async def close_side_channel(site: Site) -> None:
    """The prefill replicas answer, but nobody can fetch from them."""
    for fake in site.prefills:
        nixl = fake.replica.ranks[0].nixl
        assert nixl is not None
        assert nixl.channel is not None
        await nixl.channel.close()


async def another_engine(site: Site) -> None:
    """The prefill replicas name an engine that is not theirs any more: as if restarted since."""
    for fake in site.prefills:

        def describe(ticket: object, of: Any = fake.replica.ranks[0].transfer_params) -> object:
            params = of(ticket)
            return params and params | {"remote_engine_id": "another"}

        fake.replica.ranks[0].transfer_params = describe  # type: ignore[method-assign, assignment]


async def nothing(site: Site) -> None:
    """All is well."""


@dataclass
class Cell:
    name: str
    arrange: Arrange
    fallbacks: dict[str, float] = field(default_factory=dict)
    split: bool = True
    """Whether the answer is that of a split in the end."""
    policy: str = "fail"
    replicas: tuple[int, int] = (1, 1)
    settings: dict[str, object] = field(default_factory=dict)
    connectors: tuple[bool, bool] = (True, True)
    lease: dict[str, object] = field(default_factory=lambda: LASTING)
    """Short where only its end frees what nobody fetched."""

    def __str__(self) -> str:
        return self.name


CELLS = [
    Cell("nothing fails", nothing),
    Cell("prefill refuses, busy", fault("prefill", kind="status", status=503), {"prefill_refused": 1}, split=False),
    Cell(
        "prefill refuses, another computes",
        first_prefill_refuses,
        {"prefill_refused": 1},
        replicas=(2, 1),
    ),
    Cell("prefill fails", fault("prefill", kind="engine_error"), {"prefill_refused": 1}, split=False),
    Cell("prefill turns it down", fault("prefill", kind="status", status=400), {"prefill_refused": 1}, split=False),
    Cell("prefill is dead", stop_prefill, {"prefill_dead": 1}, split=False),
    Cell("both prefills are dead", stop_prefill, {"prefill_dead": 2}, split=False, replicas=(2, 1)),
    Cell("prefill resets", fault("prefill", kind="reset"), {"prefill_dead": 1}, split=False, lease=SHORT),
    Cell("prefill breaks off", fault("prefill", kind="cut", events=1), {"prefill_dead": 1}, split=False, lease=SHORT),
    Cell(
        "prefill talks nonsense",
        fault("prefill", kind="garbage", body="hello\r\n\r\n"),
        {"prefill_dead": 1},
        split=False,
    ),
    Cell(
        "prefill is silent",
        fault("prefill", kind="hang"),
        {"prefill_slow": 1},
        split=False,
        settings={"prefill_timeout_seconds": 0.2},
    ),
    Cell("prefill has no connector", nothing, {"no_parameters": 1}, split=False, connectors=(False, True)),
    Cell("decode has no connector", nothing, connectors=(True, False), lease=SHORT),
    Cell("decode is busy, another answers", first_decode_is_busy, {"decode_refused": 1}, replicas=(1, 2), lease=SHORT),
    Cell("decode is dead, another answers", stop_first_decode, {"decode_lost": 1}, replicas=(1, 2)),
    Cell("decode breaks off, another answers", first_decode_resets, {"decode_lost": 1}, replicas=(1, 2), lease=SHORT),
    Cell(
        "decode is busy, alone",
        fault("decode", kind="status", status=503),
        {"decode_refused": 1},
        split=False,
        lease=SHORT,
    ),
    Cell(
        "decode refuses, then computes",
        fault("decode", kind="status", status=400),
        {"decode_refused": 1},
        split=False,
        lease=SHORT,
    ),
    Cell("no KV arrives", close_side_channel, {"kv_load": 1}, split=False, lease=SHORT),
    Cell("no KV arrives, recomputed", close_side_channel, policy="recompute", lease=SHORT),
    Cell("another engine is there", another_engine, {"kv_load": 1}, split=False, lease=SHORT),
    Cell("another engine is there, recomputed", another_engine, policy="recompute", lease=SHORT),
]


async def site_for(fleet: Fleet, cell: Cell) -> Site:
    prefills = [
        await (producer(fleet, **cell.lease) if cell.connectors[0] else fleet.fake("--time-scale", "0.01"))
        for _ in range(cell.replicas[0])
    ]
    decodes = [
        await (
            consumer(fleet, kv_load_failure_policy=cell.policy, **cell.lease)
            if cell.connectors[1]
            else fleet.fake("--time-scale", "0.01")
        )
        for _ in range(cell.replicas[1])
    ]
    router = await fleet.router(
        split="always",
        prefill=" ".join(fake.url for fake in prefills),
        decode=" ".join(fake.url for fake in decodes),
        probe_seconds=60,
        **cell.settings,
    )
    await until(lambda: len(router.fleet.ready()) == len(router.fleet), "all are ready")
    return Site(prefills, decodes, router)


def counted(router: Router, name: str) -> dict[str, float]:
    """A counter's values by its first label."""
    found = {}
    for family in router.telemetry.registry.collect():
        for sample in family.samples:
            if sample.name == f"warmroute_{name}_total":
                found[next(iter(sample.labels.values()))] = sample.value
    return found


_answers: dict[str, str] = {}


async def whole_answer(fleet: Fleet, path: str, body: bytes) -> str:
    """What an engine of these says that has no part in it."""
    if path not in _answers:
        client = await fleet.direct(await fleet.fake())
        client.post(path, body)
        _answers[path] = text(await client.reply())
    return _answers[path]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_the_answer_is_whole_and_no_block_stays(fleet: Fleet, cell: Cell, stream: bool) -> None:
    site = await site_for(fleet, cell)
    body = (chat if stream else completion)(stream=stream)
    path = "/v1/chat/completions" if stream else "/v1/completions"
    wanted = await whole_answer(fleet, path, body)
    await cell.arrange(site)
    client = await fleet.client(site.router)
    client.post(path, body, b"Authorization: Bearer k\r\n")
    reply = await client.reply()
    assert text(reply) == wanted
    assert counted(site.router, "split_fallbacks") == cell.fallbacks
    assert (reply.header(b"x-warmroute-prefill") is not None) == cell.split
    await nothing_pinned(*(fake for fake in site.prefills if cell.connectors[0]))
    assert [transfers(fake).counts.late_notifications for fake in site.prefills if cell.connectors[0]] == (
        [0] * cell.replicas[0] if cell.connectors[0] else []
    )
    assert not any(fake.replica.dead for fake in (*site.prefills, *site.decodes))
    await until(lambda: not any(each.load.in_flight for each in site.router.fleet), "nothing is booked")
    client.post(path, body)
    assert text(await client.reply()) == wanted


async def test_a_stream_that_breaks_off_goes_on_elsewhere(fleet: Fleet) -> None:
    """As that of one replica does; what is left of it is not split again."""
    site = await site_for(fleet, Cell("", nothing, replicas=(1, 2)))
    path, body = "/v1/chat/completions", chat(stream=True)
    await fault("decode", kind="cut", events=3)(Site([], [site.decode], site.router))
    client = await fleet.client(site.router)
    client.post(path, body)
    reply = await client.reply()
    assert reply.header(b"x-warmroute-prefill") is not None
    assert text(reply) != ""  # whole, and without an error event; a fake goes on with words of its own
    assert site.router.telemetry.resumed.value == 1
    await nothing_pinned(site.prefill)
    assert transfers(site.prefill).counts.late_notifications == 0
