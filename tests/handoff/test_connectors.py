"""What either side is told, what is made of a prefill replica's answer, and what is refused of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.handoff.bodies import decode_body, prefill_body
from router.handoff.connector import Origin, WrongParametersError
from router.handoff.content import Content
from router.handoff.mooncake import Mooncake, read_query
from router.handoff.nixl_pull import NixlPull
from router.handoff.nixl_push import NixlPush, origin_of

HANDED = json.loads((Path(__file__).parents[1] / "data" / "vllm" / "nixl_parameters.json").read_text())
"""As vLLM 0.32.0 answered."""
MESSAGES = b'"messages":[{"role":"user","content":"a \\"stream\\": true, n"}]'


def answer(**changes: Any) -> dict[str, Any]:
    parameters = {name: value for name, value in (HANDED | changes).items() if value != "left out"}
    return {"object": "chat.completion", "kv_transfer_params": parameters}


class TestBodies:
    @pytest.mark.parametrize(
        ("body", "becomes"),
        [
            (b'{"model":"m",%s}', b'{"model":"m",%s,"max_tokens":1,"kv_transfer_params":{}}'),
            (
                b'{"stream": true, "stream_options": {"include_usage": true}, %s, "min_tokens": 4, "max_tokens": 64}',
                b'{"stream": false,  %s,  "max_tokens": 1,"kv_transfer_params":{}}',
            ),
            (
                b'{%s,"max_completion_tokens":9,"n":1,"min_completion_tokens":2,"best_of":3}',
                b'{%s,"max_completion_tokens":1,"n":1,"max_tokens":1,"kv_transfer_params":{}}',
            ),
        ],
    )
    def test_the_prefill_leg_asks_for_one_token_whole(self, body: bytes, becomes: bytes) -> None:
        assert prefill_body(body % MESSAGES, {}) == becomes % MESSAGES

    def test_a_store_needs_no_parameters(self) -> None:
        assert prefill_body(b"{%s}" % MESSAGES, None) == b'{%s,"max_tokens":1}' % MESSAGES
        assert decode_body(b"{%s}" % MESSAGES, None) == b"{%s}" % MESSAGES

    def test_token_ids_are_asked_for(self) -> None:
        assert prefill_body(b"{%s}" % MESSAGES, None, token_ids=True).endswith(b'"return_token_ids":true}')

    @pytest.mark.parametrize("space", [b"", b" \n"])
    def test_the_decode_leg_is_the_clients_own_to_the_byte(self, space: bytes) -> None:
        body = b'{ "stream" :true, %s, "min_tokens":4%s}%s' % (MESSAGES, space, space)
        told = decode_body(body, {"a": [1]})
        assert told == body[: -1 - len(space)] + b',"kv_transfer_params":{"a":[1]}}' + space

    def test_a_body_of_wider_characters(self) -> None:
        body = '{"prompt":"\u20ac"}'.encode("utf-16")
        assert json.loads(decode_body(body, {"a": 1})) == {"prompt": "\u20ac", "kv_transfer_params": {"a": 1}}


class TestNixlPull:
    def test_what_vllm_hands_over_is_passed_on_word_for_word(self) -> None:
        handed = NixlPull().read(answer(remote_registration_generation=3))
        assert handed.parameters == HANDED | {"remote_registration_generation": 3}
        assert handed.blocks == 15

    def test_the_question(self) -> None:
        assert NixlPull().ask("x") == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
        }
        assert NixlPull().ahead("x", Origin("e", "h", 1)) is None

    def test_block_ids_without_groups(self) -> None:
        assert NixlPull().read(answer(remote_block_ids=[4, 5])).blocks == 2

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"do_remote_prefill": False}, "do_remote_prefill is False, not true"),
            ({"do_remote_prefill": 1}, "do_remote_prefill is 1, not true"),
            ({"do_remote_prefill": "left out"}, "do_remote_prefill is missing, not true"),
            ({"do_remote_decode": True}, "do_remote_decode is set on both sides"),
            ({"remote_block_ids": None}, "remote_block_ids is missing, not a list of block ids"),
            ({"remote_block_ids": "left out"}, "remote_block_ids is missing, not a list of block ids"),
            ({"remote_block_ids": []}, "remote_block_ids is [], not a list of block ids"),
            ({"remote_block_ids": [[]]}, "remote_block_ids names 0 blocks"),
            ({"remote_block_ids": [[1, "2"]]}, "remote_block_ids holds what is no block id"),
            ({"remote_block_ids": [[1, True]]}, "remote_block_ids holds what is no block id"),
            ({"remote_block_ids": [[1], 2]}, "remote_block_ids"),
            ({"remote_block_ids": [[-1]]}, "remote_block_ids holds what is no block id"),
            ({"remote_engine_id": None}, "remote_engine_id is missing, not text"),
            ({"remote_engine_id": ""}, "remote_engine_id is '', not text"),
            ({"remote_request_id": "left out"}, "remote_request_id is missing, not text"),
            ({"remote_request_id": 7}, "remote_request_id is 7, not text"),
            ({"remote_host": None}, "remote_host is missing, not text"),
            ({"remote_port": None}, "remote_port is missing, not a whole number from 1 to 65535"),
            ({"remote_port": "5600"}, "remote_port is '5600', not a whole number from 1 to 65535"),
            ({"remote_port": 0}, "remote_port is 0, not a whole number from 1 to 65535"),
            ({"remote_port": True}, "remote_port is True, not a whole number from 1 to 65535"),
            ({"tp_size": None}, "tp_size is missing"),
            ({"pp_size": 0}, "pp_size is 0"),
            ({"dcp_size": "1"}, "dcp_size is '1'"),
            ({"remote_num_tokens": -4}, "remote_num_tokens is -4"),
            ({"transfer_mode": "push"}, "transfer_mode is 'push', not 'pull'"),
        ],
    )
    def test_what_would_hang_or_end_an_engine_is_not_passed_on(self, changes: dict[str, Any], why: str) -> None:
        with pytest.raises(WrongParametersError) as caught:
            NixlPull().read(answer(**changes))
        assert str(caught.value).startswith(why)

    @pytest.mark.parametrize(
        ("whole", "why"),
        [
            ({}, "it handed nothing over"),
            ({"kv_transfer_params": None}, "it handed nothing over"),
            ({"kv_transfer_params": []}, "kv_transfer_params is no object"),
            ({"kv_transfer_params": "yes"}, "kv_transfer_params is no object"),
        ],
    )
    def test_nothing_handed_over(self, whole: dict[str, Any], why: str) -> None:
        with pytest.raises(WrongParametersError, match=why):
            NixlPull().read(whole)


class TestNixlPush:
    def test_the_first_answer_tells_where_the_replica_is(self) -> None:
        connector = NixlPush()
        assert connector.ahead("x", None) is None
        handed = connector.read(answer(transfer_mode="push", pp_size=2))
        assert handed.parameters is not None
        ahead = connector.ahead("x", origin_of(handed.parameters))
        assert ahead is not None
        assert ahead.parameters == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": HANDED["remote_engine_id"],
            "remote_request_id": "x",
            "remote_host": "127.0.0.1",
            "remote_port": HANDED["remote_port"],
            "tp_size": 1,
            "pp_size": 2,
            "transfer_id": "x",
        }
        assert (connector.ask("x") or {})["transfer_id"] == "x"

    def test_an_engine_that_is_read_from_is_another_connectors(self) -> None:
        with pytest.raises(WrongParametersError, match="transfer_mode is 'pull', not 'push'"):
            NixlPush().read(answer())


class TestMooncake:
    def test_both_sides_know_the_transfer_by_its_id(self) -> None:
        origins = read_query(b'{"0":{"engine_id":"e0"},"1":{"engine_id":"e1"}}', "http://p:8998")
        ahead = Mooncake().ahead("x", origins[1])
        assert ahead is not None
        assert ahead.parameters == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": "http://p:8998",
            "remote_engine_id": "e1",
            "transfer_id": "x",
        }
        assert Mooncake().ask("x") == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}
        assert Mooncake().read({}).parameters is None

    @pytest.mark.parametrize("page", [b"", b"[]", b"{}", b'{"a":{}}', b'{"0":{}}', b'{"0":7}'])
    def test_a_bootstrap_server_that_makes_no_sense(self, page: bytes) -> None:
        with pytest.raises(WrongParametersError):
            read_query(page, "http://p:8998")

    def test_without_its_engine_nothing_can_be_fetched(self) -> None:
        with pytest.raises(WrongParametersError, match="mooncake_bootstrap_port"):
            Mooncake().ahead("x", None)


def test_content_hands_nothing_over() -> None:
    connector = Content()
    assert connector.ask("x") is None
    assert connector.read({"kv_transfer_params": {"do_remote_prefill": True}}).parameters is None
    assert connector.ahead("x", None) is None
