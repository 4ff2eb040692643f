"""NIXL, written by the replica that computes (vLLM distributed/kv_transfer/kv_connector/v1/nixl/push_scheduler.py).

Both replicas are asked at once. The one that answers makes room and registers it with the other, whose address it is
told, and waits; the other computes the prompt and writes the blocks there. The engines know the two halves by the
request's id, less the suffix that each adds, and from 0.33 on by `transfer_id`. So the id must be nobody else's: with
two of the same, one client would get the other's KV.

Where a replica is reached, its first answer tells: until there has been one, the second leg waits for the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from router.handoff.connector import Handed, Origin, Parameters, WrongParametersError, blocks
from router.handoff.nixl_pull import NixlPull, nixl_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping


class NixlPush:
    name = "nixl_push"
    shares_id = True
    once = True

    def ask(self, hand_off: str) -> Parameters | None:
        return (NixlPull().ask(hand_off) or {}) | {"transfer_id": hand_off}

    def read(self, answer: Mapping[str, Any]) -> Handed:
        parameters = nixl_parameters(answer)
        if (mode := parameters.get("transfer_mode")) != "push":
            raise WrongParametersError(f"transfer_mode is {mode!r}, not 'push'")
        return Handed(parameters, blocks(parameters, "remote_block_ids"))

    def ahead(self, hand_off: str, origin: Origin | None) -> Handed | None:
        if origin is None or not origin.engine_id:
            return None
        return Handed(
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": origin.engine_id,
                "remote_request_id": hand_off,
                "remote_host": origin.host,
                "remote_port": origin.port,
                "tp_size": origin.tp_size,
                "pp_size": origin.pp_size,
                "transfer_id": hand_off,
            }
        )


def origin_of(parameters: Parameters) -> Origin:
    """Where a replica is reached, from parameters that were checked."""
    return Origin(
        engine_id=parameters["remote_engine_id"],
        host=parameters["remote_host"],
        port=parameters["remote_port"],
        tp_size=parameters["tp_size"],
        pp_size=parameters.get("pp_size") or 1,
    )
