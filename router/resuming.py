"""A stream whose replica died goes on at another one: what its client has been given, over all replicas that it took.

The client's text becomes a part of the prompt (`router.prompt.continuing`), the next replica's events are made to
follow the last one's (`router.wire.seam`). Where that would not be exact the client is told the truth instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from router.prompt.continuing import ROUTES, UnfitError, continuation
from router.wire.resumed import Resumed
from router.wire.seam import Seam
from router.wire.stream import Said

if TYPE_CHECKING:
    from router.leg import Leg
    from router.prompt.reader import Reader
    from router.wire.attempts import Attempt, Observer, Patience
    from router.wire.front import Front
    from router.wire.http import Headers, Request


def resumable(request: Request, leg: Leg) -> bool:
    """Whether an answer to this may go on elsewhere at all, as far as can be told before it breaks off."""
    return leg.prompt.ask.stream and request.path in ROUTES


class Resumption:
    """One answer that has begun, broken off, and shall go on."""

    def __init__(self, path: str, body: bytes) -> None:
        """`body`: what the first replica was sent."""
        self._path = path
        self._body = body
        self._said = Said()
        self._tokens = 0  # of the answer, in the prompt of the last continuation
        self.broken: Attempt | None = None
        """The attempt that the client was left with."""

    def add(self, attempt: Attempt, leg: Leg) -> bool:
        """The answer broke off, at this attempt. Returns whether that had added to the text. Raises UnfitError where
        it can't go on whatever comes next."""
        self.broken = attempt
        said, before = leg.said(), self._said
        if said is None:
            raise UnfitError("not plain text")
        text = None if said.text is None or before.text is None else before.text + said.text
        tokens = before.tokens
        if said.text:
            tokens = None if said.tokens is None else self._tokens + said.tokens
        prompt_tokens = before.prompt_tokens
        if prompt_tokens is None and said.prompt_tokens is not None:
            prompt_tokens = said.prompt_tokens - self._tokens
        self._said = replace(
            said,
            text=text,
            events=before.events + said.events,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            identity=before.identity or said.identity,
            role=before.role or said.role,
        )
        if not attempt.between_events:
            raise UnfitError("within an event")
        return said.text != ""

    @property
    def ended(self) -> bool:
        """The engine had told why it finished."""
        return self._said.ended

    @property
    def size(self) -> int:
        """What there is to read for that, in bytes."""
        return len(self._body) + len(self._said.text or "")

    def body(self, reader: Reader | None) -> bytes:
        """The request by which another replica goes on. Raises UnfitError. May take long: it reads the prompt anew."""
        said = self._said
        if said.text is None:
            raise UnfitError("not plain text")
        made = continuation(self._path, self._body, said.text, reader, events=said.events, told=said.tokens)
        self._tokens = made.tokens
        return made.body

    def attempt(
        self, client: Front, request: Request, observer: Observer, patience: Patience, added: Headers | None
    ) -> Attempt:
        """What goes on where the last one broke off."""
        assert self.broken is not None
        seam = Seam(self._said, self._tokens)
        return Resumed(client, request, observer, patience, added, broken=self.broken, seam=seam)
