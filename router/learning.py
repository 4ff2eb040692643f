"""What a request's answer teaches: what is cached there now, how fast it was, whether the prediction held."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.choose.dispatch import Dispatch, Placement
    from router.fleet.links import Links
    from router.index.feedback import Change, Feedback
    from router.leg import Leg
    from router.prompt.blocks import Chain
    from router.prompt.reader import Reader
    from router.reading import Prompt, Reading
    from router.telemetry import Telemetry
    from router.wire.stream import Answer

log = logging.getLogger("warmroute.learning")


class Learning:
    """Tells the index, the rates, the feedback and the metrics what was seen of answers."""

    def __init__(
        self,
        *,
        reading: Reading,
        dispatch: Dispatch,
        feedback: Feedback,
        telemetry: Telemetry,
        load_changed: Callable[[], None],
        links: Links,
    ) -> None:
        self._reading = reading
        self._dispatch = dispatch
        self._feedback = feedback
        self._telemetry = telemetry
        self._load_changed = load_changed
        self._links = links
        self._clock = asyncio.get_running_loop().time

    def first_token(self, leg: Leg) -> None:
        """The first byte of a streamed answer: the engine is through with the prefill."""
        now, placement = self._clock(), leg.placement
        counters = self._telemetry.replica(placement.replica.name)
        leg.first_token_at, leg.pace = now, counters.pace
        if leg.split is None:
            self._dispatch.first_token(now, placement)
        else:
            self._dispatch.fetched(now, leg.split, self._links)
            if leg.split.handed_at is not None:
                self._telemetry.fetch_seconds.observe(now - leg.split.handed_at)
        self._load_changed()
        leg.prompt.settle()
        counters.ttft.observe(now - placement.chosen_at)

    def answered(self, leg: Leg) -> None:
        """The answer is whole: its blocks are cached too, and the engine may have told what it had."""
        answer = leg.answer()
        if answer is None or answer.failed:
            return
        if answer.completion_tokens is not None:
            self._telemetry.replica(leg.placement.replica.name).completion_tokens.inc(answer.completion_tokens)
        if leg.split is None:
            self.computed(leg.prompt, leg.placement, answer)
        ask, reader = leg.prompt.ask, leg.prompt.reader
        if reader is None or not leg.prompt.views:
            return
        chains = self._reading.chains(leg.prompt, leg.placement.replica)
        beyond = 0
        # An answer's last token is sampled, but never computed: of one alone nothing comes to be cached.
        if len(chains) == 1 and ask.n == 1 and ask.max_tokens != 1 and not _fills_none(chains[0], reader, answer):
            (chain,) = chains
            generated = reader.answer(ask, answer.text, answer.token_ids, finish_reason=answer.finish_reason)
            if generated and not _altered(reader, answer, len(generated)):
                chains = [chain.extend(generated)]
            elif answer.completion_tokens is not None:
                computed = chain.length + (answer.completion_tokens - 1) * reader.units_per_token
                beyond = max(0, computed // chain.block_size - len(chain.keys))
        self._dispatch.answered(leg.placement, chains, beyond=beyond)

    def computed(self, prompt: Prompt, placement: Placement, answer: Answer) -> None:
        """A replica has computed a prompt, and may have told how much of it was cached there."""
        name = placement.replica.name
        if answer.cached_tokens is not None:
            self._telemetry.replica(name).delivered_tokens.inc(answer.cached_tokens)
        if prompt.reader is None or not prompt.views:
            return
        changed = self._feedback.answered(
            name,
            exact=prompt.reader.exact and not prompt.ask.inexact,
            tokens=sum(prompt.tokens),
            predicted=placement.hit,
            prompt_tokens=answer.prompt_tokens,
            cached=answer.cached_tokens,
        )
        if changed is not None:
            tell(changed)


def tell(change: Change) -> None:
    """One log line for a replica whose cache routing became degraded, or healed."""
    if change.cause is None:
        log.info("%s: cache routing is sound again", change.replica)
    else:
        log.warning("%s: cache routing is degraded: %s", change.replica, change.cause)


def _fills_none(chain: Chain, reader: Reader, answer: Answer) -> bool:
    """Whether an answer is so short that it fills no block: then its words need not be read."""
    counted = answer.completion_tokens if reader.exact and answer.token_ids is None else None
    return counted is not None and chain.has_room(counted - 1)


def _altered(reader: Reader, answer: Answer, tokens: int) -> bool:
    """Whether the answer's text, tokenized again, has another length than the engine generated: then the blocks that
    the engine holds are not those of the text, and the next turn will not find them."""
    if not reader.exact or answer.token_ids is not None or answer.completion_tokens is None:
        return False
    return tokens != answer.completion_tokens - 1
