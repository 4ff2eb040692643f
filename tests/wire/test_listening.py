"""When the door opens: at once for the kernel, for clients as soon as one replica is ready, and never in vain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import pytest

from router.app import Router
from router.config import ConfigError
from tests.wire.conftest import Bench, settings_for
from tests.wire.scripted import CHAT, Received, until, within


async def deaf(bench: Bench) -> str:
    """A replica that takes connections and never says a word."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    bench._stack.callback(server.close)
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_silent_replica_does_not_keep_the_door_shut(bench: Bench) -> None:
    replica = await bench.replica()
    settings = settings_for([await deaf(bench), replica.url], probe_timeout_seconds=600)
    async with asyncio.timeout(60), Router(settings) as router:
        client = await bench.client(router)
        client.post("/v1/chat/completions", b"{}")
        assert (await client.reply()).body == CHAT
        assert [each.name for each in router.fleet.ready()] == [replica.name]


async def test_whoever_comes_before_the_first_replica_is_served_by_it(bench: Bench) -> None:
    """The port answers from the start: connections wait in the kernel, none is refused and none gets a 503."""
    go = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await replica._serve(reader, writer)

    replica = await bench.replica()
    server = await asyncio.start_server(late, "127.0.0.1", 0)
    bench._stack.callback(server.close)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    router = Router(settings_for([url], probe_timeout_seconds=600))
    opening = asyncio.create_task(router.__aenter__())
    await until(lambda: router.address[1] != 0, "it listens")
    client = await bench.client(router)
    client.post("/v1/chat/completions", b"{}")
    assert not opening.done()
    go.set()
    await within(opening)
    assert (await client.reply()).status == 200
    await router.__aexit__()


@pytest.mark.parametrize("admin", [False, True], ids=["clients' port", "admin port"])
async def test_a_port_in_use_is_an_error_that_names_the_setting(bench: Bench, admin: bool) -> None:
    replica = await bench.replica()
    router = await bench.router(replica, admin_port=0)
    taken = router.admin_address if admin else router.address
    assert taken is not None
    with pytest.raises(ConfigError) as error:
        await Router(settings_for([replica.url], **{"admin_port" if admin else "port": taken[1]})).__aenter__()
    flag = "--admin-port" if admin else "--port"
    assert str(error.value).startswith(
        f"cannot listen on 127.0.0.1:{taken[1]}: address already in use; choose another {flag}"
    )


async def test_hosts_that_are_not_ours_and_one_port_for_both_sides(bench: Bench) -> None:
    for host, said in (("203.0.113.1", "choose another --host"), ("nosuch.invalid", "--host nosuch.invalid")):
        with pytest.raises(ConfigError, match=said):
            await Router(settings_for(["http://127.0.0.1:1"], host=host)).__aenter__()
    with pytest.raises(ConfigError, match="--port and --admin-port are both 9390"):
        Router(settings_for(["http://127.0.0.1:1"], port=9390, admin_port=9390))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_it_starts_ends_it_at_once(bench: Bench, number: signal.Signals) -> None:
    asked = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    bench._stack.callback(server.close)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "serve", url, "--port", "0", "--admin-port", "-1"),
        *("--probe-timeout-seconds", "600"),
        stderr=asyncio.subprocess.PIPE,
    )
    await within(asked.wait())
    process.send_signal(number)
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert b"Traceback" not in said
    assert b"listens" not in said


async def test_what_was_refused_before_it_was_a_request_is_counted(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("nothing may arrive")

    router = await bench.router(await bench.replica(script))
    client = await bench.client(router)
    client.send(b"hello\r\n\r\n")
    assert (await client.reply()).status == 400
    assert b'warmroute_requests_total{code="4xx",ending="refused"} 1.0' in router.telemetry.page()
