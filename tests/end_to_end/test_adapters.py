"""LoRA adapters: their blocks are theirs alone, as in the engine."""

from __future__ import annotations

from typing import Any

import pytest

from router.fleet.probe import MODELS_EVERY
from tests.end_to_end.conftest import Fleet
from tests.end_to_end.test_clients import turn

LORA = ("--enable-lora", "--max-loras", "2", "--lora-modules")
PROMPT = "The keeper writes of wind and tide in the long evening. " * 60


async def asked(client: Any, model: str, **extra: Any) -> tuple[int, int]:
    """The predicted and the delivered cached tokens of a completion."""
    raw = await client.completions.with_raw_response.create(model=model, prompt=PROMPT, max_tokens=2, extra_body=extra)
    usage = raw.parse().usage
    assert usage is not None
    details = usage.prompt_tokens_details
    return int(raw.headers["x-warmroute-predicted-tokens"]), (details.cached_tokens or 0) if details else 0


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash_cbor"])
async def test_a_prompt_is_another_one_for_every_adapter(fleet: Fleet, algorithm: str) -> None:
    fake = await fleet.fake(*LORA, "one=/adapters/one", "two=/adapters/two", "--prefix-caching-hash-algo", algorithm)
    router = await fleet.router(fake)
    (replica,) = router.fleet.ready()
    base = next(card.id for card in replica.models.values() if card.parent is None)
    assert {card.id: card.parent for card in replica.models.values()} == {base: None, "one": base, "two": base}
    assert router.readers[base].exact
    client = await fleet.openai(router)
    for model in (base, "one", "two"):
        assert await asked(client, model) == (0, 0), model
    for model in (base, "one", "two"):
        predicted, cached = await asked(client, model)
        assert predicted == cached > 0, model
    # A salt parts them once more.
    for model in (base, "one"):
        assert await asked(client, model, cache_salt="s") == (0, 0)
        predicted, cached = await asked(client, model, cache_salt="s")
        assert predicted == cached > 0


async def test_conversations_with_adapters_find_their_past(fleet: Fleet) -> None:
    fakes = [await fleet.fake(*LORA, "one=/adapters/one", "two=/adapters/two", "--seed", str(i)) for i in range(2)]
    router = await fleet.router(*fakes)
    client = await fleet.openai(router)
    base = next(card.id for card in router.fleet.ready()[0].models.values() if card.parent is None)
    talks: dict[tuple[str, int], list[dict[str, str]]] = {
        (model, i): [{"role": "user", "content": f"{PROMPT} {i}"}] for model in (base, "one", "two") for i in range(2)
    }
    homes: dict[tuple[str, int], str] = {}
    for round_ in range(3):
        for which, messages in talks.items():
            text, replica, predicted, cached = await turn(client, which[0], messages, stream=True)
            assert predicted == cached
            assert homes.setdefault(which, replica) == replica
            if round_:
                assert predicted > 0
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on. " * 10}]


async def test_an_adapter_of_one_name_and_two_paths(fleet: Fleet) -> None:
    """Each replica hashes by its own path; what one holds is looked up as that one hashes it."""
    fakes = [await fleet.fake(*LORA, f"one=/adapters/{i}") for i in range(2)]
    router = await fleet.router(*fakes, policy="round_robin")
    client = await fleet.openai(router)
    assert [await asked(client, "one") for _ in range(2)] == [(0, 0), (0, 0)]
    for _ in range(2):
        predicted, cached = await asked(client, "one")
        assert predicted == cached > 0


async def test_an_adapter_loaded_anew_from_elsewhere_is_another_one(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    fake = await fleet.fake(*LORA, "one=/adapters/one")
    router = await fleet.router(fake, probe_seconds=3600)
    client = await fleet.openai(router)
    assert await asked(client, "one") == (0, 0)
    direct = await fleet.direct(fake)
    direct.post("/v1/load_lora_adapter", b'{"lora_name":"one","lora_path":"/adapters/better","load_inplace":true}')
    assert (await direct.reply()).status == 200
    for _ in range(MODELS_EVERY):
        assert router._roster is not None
        await next(iter(router._roster._asked.values())).probe.once()
    assert router.fleet.ready()[0].models["one"].root == "/adapters/better"
    assert await asked(client, "one") == (0, 0)
    predicted, cached = await asked(client, "one")
    assert predicted == cached > 0


async def test_a_request_goes_where_its_adapter_is(fleet: Fleet) -> None:
    fakes = [await fleet.fake(*LORA, f"{name}=/adapters/{name}") for name in ("one", "two")]
    router = await fleet.router(*fakes)
    client = await fleet.openai(router)
    for name, fake in (("one", fakes[0]), ("two", fakes[1])):
        for _ in range(3):
            raw = await client.completions.with_raw_response.create(model=name, prompt="a", max_tokens=1)
            assert "http://" + raw.headers["x-warmroute-replica"] == fake.url
