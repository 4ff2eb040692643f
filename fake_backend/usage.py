"""``usage`` objects."""

from collections.abc import Sequence

from fake_backend.runtime import Ticket


def prompt_details(cached: int) -> dict[str, int | None]:
    return {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}


def counts(prompt: int, completion: int) -> dict[str, object]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def totals(groups: Sequence[Sequence[Ticket]]) -> tuple[int, int, int]:
    """(prompt tokens, completion tokens, cached tokens) over prompts, each with its n answers: a prompt counts once."""
    prompt = sum(len(group[0].prompt_ids) for group in groups)
    completion = sum(ticket.request.generated for group in groups for ticket in group)
    cached = sum(group[0].request.cached_tokens or 0 for group in groups)
    return prompt, completion, cached


def full(groups: Sequence[Sequence[Ticket]], *, details: bool) -> dict[str, object]:
    """The usage of an answer that is no stream."""
    prompt, completion, cached = totals(groups)
    return {
        **counts(prompt, completion),
        "prompt_tokens_details": prompt_details(cached) if details else None,
        "completion_tokens_details": None,
    }


def final(groups: Sequence[Sequence[Ticket]], *, details: bool) -> dict[str, object]:
    """The usage in a stream's last chunk, which leaves out what is null."""
    prompt, completion, cached = totals(groups)
    usage = counts(prompt, completion)
    if details:
        usage["prompt_tokens_details"] = prompt_details(cached)
    return usage
