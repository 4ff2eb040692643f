"""What a server says of itself: health, models, version, load, metrics."""

import secrets

from fake_backend.errors import JSON_HEADERS, compact
from fake_backend.metrics import CONTENT_TYPE
from fake_backend.replica import Replica
from fake_backend.wire import Exchange

VARY = (("vary", "Origin"),)


async def health(replica: Replica, exchange: Exchange) -> None:
    """200 while the engine lives."""
    exchange.reply(503 if replica.dead else 200, b"", VARY)


async def version(replica: Replica, exchange: Exchange) -> None:
    exchange.reply(200, compact({"version": replica.settings.vllm_version}), JSON_HEADERS)


async def load(replica: Replica, exchange: Exchange) -> None:
    """Requests in the server, which vLLM counts only when told to."""
    count = replica.in_server if replica.settings.load_tracking else 0
    exchange.reply(200, compact({"server_load": count}), JSON_HEADERS)


async def metrics(replica: Replica, exchange: Exchange) -> None:
    exchange.reply(200, replica.metrics.text(), (("content-type", CONTENT_TYPE), *VARY))


async def kv_event_sources(replica: Replica, exchange: Exchange) -> None:
    exchange.reply(200, compact(replica.event_sources()), JSON_HEADERS)


def _card(identity: str, root: str, parent: str | None, max_model_len: int | None, created: int) -> dict[str, object]:
    return {
        "id": identity,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [
            {
                "id": f"modelperm-{secrets.token_hex(8)}",
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


async def models(replica: Replica, exchange: Exchange) -> None:
    settings, created = replica.settings, replica.created
    base = settings.served_names[0]
    cards = [_card(name, settings.root, None, settings.max_model_len, created) for name in settings.served_names]
    cards += [_card(module.name, module.path, module.base or base, None, created) for module in replica.loras.values()]
    exchange.reply(200, compact({"object": "list", "data": cards}), JSON_HEADERS)
