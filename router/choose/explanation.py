"""A decision in words and numbers: what the router would do with a request, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.choose.policies import Decision
from router.choose.split import SplitDecision


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was read of a request and what was weighed. `unread`: why only load could guide it, if so. `blocks`: whole
    blocks of all prompts, by block size in tokens. `errors`: each replica's mean error of prediction, and why its cache
    routing is degraded, if it is. `split`: of a request that could be split between two replicas.
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
    split: SplitDecision | None = None
    served: bool = True
    """Whether any replica names the model."""

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
            "choice": self._choice(),
            "reason": self._reason(),
            "split": None if self.split is None else _split_document(self.split),
            "words": self.words(),
        }

    def _choice(self) -> str | None:
        if self.split is not None:
            return self.split.candidates[self.split.decode].name
        return self.decision.candidate.name if self.decision else None

    def _reason(self) -> str | None:
        if self.split is not None:
            return self.split.reason
        return self.decision.reason if self.decision else self.none_because

    def words(self) -> str:
        """The same for people."""
        model = f"model {self.model}" if self.model else "no model named"
        if not self.served:
            model += ", which no replica serves (it goes to any, and the engine refuses it)"
        if self.unread:
            lines = [f"{self.kind} request, {model}: routed by load alone, since {self.unread}"]
        else:
            blocks = ", ".join(f"{count} blocks of {size}" for size, count in self.blocks.items())
            prompts = f"{len(self.tokens)} prompts of " if len(self.tokens) > 1 else ""
            lines = [f"{self.kind} request, {model}: {prompts}{sum(self.tokens)} tokens ({self.read_as}), {blocks}"]
        if self.decision is None:
            return "\n".join([*lines, f"no replica: {self.none_because}"])
        chosen = self._choice()
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
        lines += [f"{chosen} is chosen: {self._reason()}"] if self.split is None else _split_words(self.split)
        return "\n".join(lines)


def _split_document(split: SplitDecision) -> dict[str, Any]:
    names, pair = [candidate.name for candidate in split.candidates], split.pair
    return {
        "decision": "local" if split.prefill is None else "split",
        "prefill": None if split.prefill is None else names[split.prefill],
        "decode": names[split.decode],
        "local_ms": round(split.local_price.total_ms, 3),
        "pair": None
        if pair is None
        else {
            "prefill": names[pair.prefill],
            "decode": names[pair.decode],
            "prefill_ms": round(pair.price.prefill.total_ms, 3),
            "transfer_ms": round(pair.price.transfer_ms, 3),
            "total_ms": round(pair.price.total_ms, 3),
            "link_bytes_per_second": round(pair.link.bandwidth),
            "link_is_measured": pair.link.measured,
            "link_is_fast": pair.link.fast,
        },
    }


def _split_words(split: SplitDecision) -> list[str]:
    names, pair = [candidate.name for candidate in split.candidates], split.pair
    lines = []
    if pair is not None:
        price, link = pair.price, pair.link
        how = "measured" if link.measured else "told"
        lines.append(
            f"split: {names[pair.prefill]} computes and {names[pair.decode]} answers: {price.total_ms:.1f} ms, "
            f"of which prefill {price.prefill.total_ms:.1f} and transfer {price.transfer_ms:.1f} "
            f"({link.bandwidth / 1e9:.1f} GB/s, {how}); {names[split.local]} alone: {split.local_price.total_ms:.1f} ms"
        )
    if split.prefill is None:
        lines.append(f"{names[split.decode]} does all of it: {split.reason}")
    else:
        lines.append(f"{names[split.prefill]} computes the prompt, {names[split.decode]} answers: {split.reason}")
    return lines
