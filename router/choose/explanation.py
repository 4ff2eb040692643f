"""A decision in words and numbers: what the router would do with a request, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.choose.policies import Decision


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was read of a request and what was weighed. `unread`: why only load could guide it, if so. `blocks`: whole
    blocks of all prompts, by block size in tokens. `errors`: each replica's mean error of prediction, and why its cache
    routing is degraded, if it is.
    """

    model: str | None
    kind: str
    read_as: str | None
    unread: str | None
    tokens: list[int]
    blocks: dict[int, int]
    decision: Decision | None
    none_because: str | None
    errors: dict[str, tuple[float, str | None]]

    def document(self) -> dict[str, Any]:
        """The same for programs."""
        replicas = []
        if self.decision is not None:
            for candidate, price in zip(self.decision.candidates, self.decision.prices, strict=True):
                name = candidate.name
                error, cause = self.errors.get(name, (0.0, None))
                replicas.append(
                    {
                        "replica": name,
                        "cached_tokens": candidate.hit,
                        "continues_a_turn": candidate.continues,
                        "in_flight": candidate.in_flight,
                        "decoding": candidate.decoding,
                        "slowness": round(candidate.slowness, 3),
                        "waiting_ms": round(price.waiting_ms, 3),
                        "prefill_ms": round(price.prefill_ms, 3),
                        "slowed_prefill_ms": round(price.slowed_ms, 3),
                        "placement_ms": round(price.placement_ms, 3),
                        "total_ms": round(price.total_ms, 3),
                        "prediction_error": round(error, 4),
                        "degraded": cause,
                    }
                )
        return {
            "model": self.model,
            "kind": self.kind,
            "read_as": self.read_as,
            "unread": self.unread,
            "tokens": self.tokens,
            "blocks": {str(size): count for size, count in self.blocks.items()},
            "replicas": replicas,
            "choice": self.decision.candidate.name if self.decision else None,
            "reason": self.decision.reason if self.decision else self.none_because,
            "words": self.words(),
        }

    def words(self) -> str:
        """The same for people."""
        model = f"model {self.model}" if self.model else "no model named"
        if self.unread:
            lines = [f"{self.kind} request, {model}: routed by load alone, since {self.unread}"]
        else:
            blocks = ", ".join(f"{count} blocks of {size}" for size, count in self.blocks.items())
            prompts = f"{len(self.tokens)} prompts of " if len(self.tokens) > 1 else ""
            lines = [f"{self.kind} request, {model}: {prompts}{sum(self.tokens)} tokens ({self.read_as}), {blocks}"]
        if self.decision is None:
            return "\n".join([*lines, f"no replica: {self.none_because}"])
        chosen = self.decision.candidate.name
        weighed = zip(self.decision.candidates, self.decision.prices, strict=True)
        for candidate, price in sorted(weighed, key=lambda pair: pair[1].total_ms):
            name = candidate.name
            total = max(sum(self.tokens), 1)
            warm = f"holds {candidate.hit} of {total} tokens" if candidate.hit else "holds nothing of it"
            if candidate.continues:
                warm += ", where a turn ended"
            terms = [f"wait {price.waiting_ms:.1f}", f"prefill {price.slowed_ms:.1f}"]
            if price.placement_ms:
                terms.append(f"placement {price.placement_ms:.1f}")
            mark = "->" if name == chosen else "  "
            lines.append(
                f"{mark} {name}: {price.total_ms:.1f} ms = {' + '.join(terms)}; {warm}; "
                f"{candidate.in_flight} in flight, {candidate.decoding} of them decoding"
            )
            _, cause = self.errors.get(name, (0.0, None))
            if cause:
                lines.append(f"     its cache routing is degraded: {cause}")
        lines.append(f"{chosen} is chosen: {self.decision.reason}")
        return "\n".join(lines)
