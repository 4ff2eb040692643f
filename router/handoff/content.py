"""Stores that find blocks by their content: LMCache, offloading to shared storage, Mooncake's store, vLLM's example.

The replica that computes a prompt puts its blocks there by itself, and the one that answers finds them by their hashes.
So nothing is handed over, and nothing is pinned: the order alone matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from router.handoff.connector import Handed, Parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.handoff.connector import Origin


class Content:
    name = "content"
    shares_id = False
    once = False

    def ask(self, hand_off: str) -> Parameters | None:
        return None

    def read(self, answer: Mapping[str, Any]) -> Handed:
        return Handed(None)

    def ahead(self, hand_off: str, origin: Origin | None) -> Handed | None:
        return None
