"""Mooncake (vLLM distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py).

Both replicas are asked at once, and know the transfer by an id of ours. The one that answers is told who computes the
prompt: the engine's id, which each prefill replica tells on its bootstrap port (GET /query), and that port's address.
The answer of the one that computes hands nothing over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from router.handoff.connector import Handed, Origin, Parameters, WrongParametersError, text

if TYPE_CHECKING:
    from collections.abc import Mapping


class Mooncake:
    name = "mooncake"
    shares_id = False
    once = True

    def ask(self, hand_off: str) -> Parameters | None:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": hand_off}

    def read(self, answer: Mapping[str, Any]) -> Handed:
        return Handed(None)

    def ahead(self, hand_off: str, origin: Origin | None) -> Handed | None:
        if origin is None or not origin.engine_id:
            raise WrongParametersError("its bootstrap server has not told its engine's id (mooncake_bootstrap_port)")
        return Handed(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_bootstrap_addr": origin.bootstrap,
                "remote_engine_id": origin.engine_id,
                "transfer_id": hand_off,
            }
        )


def read_query(page: bytes, bootstrap: str) -> dict[int, Origin]:
    """The engines behind a bootstrap server, by data-parallel rank. Raises WrongParametersError."""
    try:
        told = orjson.loads(page)
    except orjson.JSONDecodeError:
        raise WrongParametersError("its bootstrap server's answer is no JSON") from None
    if not isinstance(told, dict) or not told:
        raise WrongParametersError("its bootstrap server names no engine")
    origins = {}
    for rank, entry in told.items():
        if not rank.isdecimal() or not isinstance(entry, dict):
            raise WrongParametersError("its bootstrap server's answer is no list of engines by rank")
        origins[int(rank)] = Origin(engine_id=text(entry, "engine_id"), bootstrap=bootstrap)
    return origins
