"""Conversations through the router to fake replicas, held by the official openai client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.end_to_end.conftest import Fleet
from tests.wire.scripted import until

SYSTEM = "You answer in the manner of a lighthouse keeper, briefly and with regard to the weather. " * 12


async def turn(client: Any, model: str, messages: list[dict[str, str]], *, stream: bool) -> tuple[str, str, int, int]:
    """One chat turn: the answer, the replica, the predicted and the delivered cached tokens."""
    if not stream:
        raw = await client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=40)
        whole = raw.parse()
        text = whole.choices[0].message.content
        usage = whole.usage
    else:
        raw = await client.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for event in raw.parse():
            for choice in event.choices:
                text += choice.delta.content or ""
            usage = event.usage or usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    headers = raw.headers
    return text, headers["x-warmroute-replica"], int(headers["x-warmroute-predicted-tokens"]), cached or 0


@pytest.mark.fault("affinity never begins")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_turn_finds_its_past_and_the_prediction_is_exact(fleet: Fleet, stream: bool) -> None:
    fakes = [await fleet.fake("--seed", str(i)) for i in range(3)]
    router = await fleet.router(*fakes)
    client = await fleet.openai(router)
    model = (await client.models.list()).data[0].id
    talks: list[list[dict[str, str]]] = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Talk {i}: who are you? {'x ' * 40}"}]
        for i in range(6)
    ]
    homes: dict[int, str] = {}
    for round_ in range(5):
        for i, messages in enumerate(talks):
            text, replica, predicted, cached = await turn(client, model, messages, stream=stream)
            assert predicted == cached
            assert homes.setdefault(i, replica) == replica
            if round_:
                assert predicted > 0
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"Go on, {i}.{round_}: {'y ' * 30}"},
            ]
    assert len(set(homes.values())) == 3
    assert all(replica.load.in_flight == 0 for replica in router.fleet)


@pytest.mark.fault("shapes of prompts")
async def test_completions_of_every_shape(fleet: Fleet) -> None:
    fakes = [await fleet.fake() for _ in range(2)]
    router = await fleet.router(*fakes)
    client = await fleet.openai(router)
    model = (await client.models.list()).data[0].id
    ids = [100 + i % 700 for i in range(2000)]
    for prompt in ("word " * 2000, ["word " * 2000, "other " * 2000], ids, [ids, ids[::-1]]):
        replicas = set()
        for again in range(3):
            raw = await client.completions.with_raw_response.create(model=model, prompt=prompt, max_tokens=4)
            usage = raw.parse().usage
            assert usage is not None
            replicas.add(raw.headers["x-warmroute-replica"])
            predicted = int(raw.headers["x-warmroute-predicted-tokens"])
            details = usage.prompt_tokens_details
            assert predicted == ((details.cached_tokens or 0) if details else 0)
            assert (predicted > 0) is (again > 0 or isinstance(prompt[0], list) or len(prompt) == 2)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
async def test_predictions_hold_for_every_algorithm_salt_and_block_size(fleet: Fleet, algorithm: str) -> None:
    fakes = [await fleet.fake("--prefix-caching-hash-algo", algorithm, "--block-size", size) for size in ("16", "32")]
    router = await fleet.router(*fakes)
    client = await fleet.openai(router)
    model = (await client.models.list()).data[0].id
    for salt in (None, "tenant-a", "tenant-b"):
        extra = {"cache_salt": salt} if salt else {}
        for again in range(2):
            raw = await client.completions.with_raw_response.create(
                model=model, prompt="word " * 500, max_tokens=2, extra_body=extra
            )
            usage = raw.parse().usage
            assert usage is not None
            details = usage.prompt_tokens_details
            predicted = int(raw.headers["x-warmroute-predicted-tokens"])
            assert predicted == ((details.cached_tokens or 0) if details else 0)
            assert (predicted > 0) is (again > 0)


@pytest.mark.fault("suffix taken for a prefix")
async def test_a_suffix_is_no_prefix(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.fake())
    client = await fleet.openai(router)
    model = (await client.models.list()).data[0].id
    text = "harbour " * 400
    for prompt, hit in ((text, False), ("y " + text, False), (text + "z", True)):
        raw = await client.completions.with_raw_response.create(model=model, prompt=prompt, max_tokens=1)
        assert (int(raw.headers["x-warmroute-predicted-tokens"]) > 0) is hit


MALFORMED = {
    "an array": b"[1]",
    "null": b"null",
    "truncated": b'{"model":',
    "deep": b'{"model":"m","messages":' + b"[" * 3000 + b"]" * 3000 + b"}",
    "latin-1": b'{"model":"m","messages":[{"role":"user","content":"caf\xe9"}]}',
    "empty": b"",
}


@pytest.mark.fault("malformed bodies")
@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_malformed_bodies_are_the_engines_400(fleet: Fleet, path: str, body: bytes) -> None:
    fake = await fleet.fake()
    router = await fleet.router(fake)
    through, direct = await fleet.client(router), await fleet.direct(fake)
    through.post(path, body)
    direct.post(path, body)
    reply = await through.reply()
    assert reply.status == 400
    assert reply.body == (await direct.reply()).body


@pytest.mark.fault("other routes")
async def test_routes_of_the_engine_are_reached(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.fake(), await fleet.fake())
    client = await fleet.client(router)
    model = next(iter(router.fleet.ready()[0].models))
    client.post("/v1/embeddings", json.dumps({"model": model, "input": "hello"}).encode())
    assert (await client.reply()).status in (200, 404)  # what the engine says of it, not what the router makes of it
    client.post("/tokenize", json.dumps({"model": model, "prompt": "hello"}).encode())
    assert (await client.reply()).json["count"]
    client.send(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert "version" in (await client.reply()).json
    client.send(b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.reply()).json == {"detail": "Not Found"}


@pytest.mark.fault("work for nobody", "left before the first byte")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_engine_stops_working_when_the_client_leaves(fleet: Fleet, stream: bool) -> None:
    fake = await fleet.fake("--time-scale", "1")
    router = await fleet.router(fake)
    client = await fleet.client(router)
    model = next(iter(router.fleet.ready()[0].models))
    body = {"model": model, "stream": stream, "max_tokens": 8000, "ignore_eos": True, "min_tokens": 8000}
    client.post("/v1/chat/completions", json.dumps(body | {"messages": [{"role": "user", "content": "a"}]}).encode())
    engine = fake.replica.engines[0]
    await until(lambda: len(engine.scheduler.running) == 1, "the engine works")
    client.leave()
    await until(lambda: len(engine.scheduler) == 0, "the engine has stopped")
    await until(lambda: all(r.load.in_flight == 0 for r in router.fleet), "nothing is in flight")


async def test_without_a_tokenizer_conversations_still_find_their_past(fleet: Fleet) -> None:
    fakes = [await fleet.fake() for _ in range(2)]
    router = await fleet.router(*fakes)
    router.readers._found.clear()
    for replica in router.fleet:
        for card in replica.models:
            router.readers._found[card] = router.readers._bytes
    client = await fleet.openai(router)
    model = (await client.models.list()).data[0].id
    talks: list[list[dict[str, str]]] = [[{"role": "user", "content": f"Talk {i}. {SYSTEM}"}] for i in range(4)]
    homes: dict[int, str] = {}
    for round_ in range(4):
        for i, messages in enumerate(talks):
            text, replica, predicted, cached = await turn(client, model, messages, stream=True)
            assert homes.setdefault(i, replica) == replica
            if round_:
                assert predicted > 0
                assert cached > 0
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    assert sorted(list(homes.values()).count(home) for home in set(homes.values())) == [2, 2]


async def test_caching_off_at_the_replica_means_no_prediction(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.fake("--no-enable-prefix-caching"))
    client = await fleet.openai(router)
    model = (await client.models.list()).data[0].id
    for _ in range(2):
        raw = await client.completions.with_raw_response.create(model=model, prompt="word " * 300, max_tokens=1)
        assert raw.headers["x-warmroute-predicted-tokens"] == "0"
