"""NIXL, read by the replica that answers (vLLM distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py).

The replica that computes a prompt keeps its blocks for a lease and says in its answer where they lie. The other one is
told that, word for word, and reads them before it computes the last token. What was handed over is good for one
request: its blocks are free as soon as that has read them, and a second reader would get whatever is there then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from router.handoff.connector import Handed, Parameters, WrongParametersError, blocks, flag, number, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.handoff.connector import Origin


class NixlPull:
    name = "nixl"
    shares_id = False
    once = True

    def ask(self, hand_off: str) -> Parameters | None:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def read(self, answer: Mapping[str, Any]) -> Handed:
        parameters = nixl_parameters(answer)
        if (mode := parameters.get("transfer_mode", "pull")) != "pull":
            raise WrongParametersError(f"transfer_mode is {mode!r}, not 'pull'")
        return Handed(parameters, blocks(parameters, "remote_block_ids"))

    def ahead(self, hand_off: str, origin: Origin | None) -> Handed | None:
        return None


def nixl_parameters(answer: Mapping[str, Any]) -> Parameters:
    """The parameters in an answer, each checked that a decode replica reads. Raises WrongParametersError."""
    parameters = answer.get("kv_transfer_params")
    if parameters is None:
        raise WrongParametersError("it handed nothing over; does it run with a --kv-transfer-config?")
    if not isinstance(parameters, dict):
        raise WrongParametersError("kv_transfer_params is no object")
    flag(parameters, "do_remote_prefill", wanted=True)
    if parameters.get("do_remote_decode"):
        raise WrongParametersError("do_remote_decode is set on both sides")
    for name in ("remote_engine_id", "remote_request_id", "remote_host"):
        text(parameters, name)
    number(parameters, "remote_port", 1, 65535)
    number(parameters, "tp_size", 1)
    for name in ("dcp_size", "pp_size"):
        if parameters.get(name) is not None:
            number(parameters, name, 1)
    if parameters.get("remote_num_tokens") is not None:
        number(parameters, "remote_num_tokens", 1)
    blocks(parameters, "remote_block_ids")
    return parameters
