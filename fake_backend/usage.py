"""``usage`` objects."""

from collections.abc import Mapping, Sequence

from fake_backend.replica import Job, Replica
from fake_backend.runtime import Ticket

Details = dict[str, int | None]


def details(replica: Replica, jobs: Sequence[Job]) -> Details | None:
    """``prompt_tokens_details``, if the server was told to show them. A prompt's n answers count once."""
    if not replica.settings.prompt_tokens_details:
        return None
    cached = sum(_cached(job.tickets[0]) for job in jobs)
    return {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}


def chat_details(replica: Replica, ticket: Ticket) -> Details | None:
    """The same for a chat, which also says how much of its prompt has newly entered the cache."""
    if not replica.settings.prompt_tokens_details:
        return None
    cached = _cached(ticket)
    size = replica.settings.block_size
    created = max(0, len(ticket.prompt_ids) // size * size - cached) if replica.settings.prefix_caching else 0
    return {"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": None}


def _cached(ticket: Ticket) -> int:
    """Prompt tokens found in a cache: after a remote prefill, in the prefill replica's."""
    request = ticket.request
    if request.external_tokens and isinstance(request.transfer, Mapping):
        return int(request.transfer.get("remote_prefill_cached_tokens") or 0)
    return request.cached_tokens or 0


def counts(prompt: int, completion: int) -> dict[str, object]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def _totals(groups: Sequence[Sequence[Ticket]]) -> dict[str, object]:
    """Over prompts, each with its n answers: a prompt counts once."""
    prompt = sum(len(group[0].prompt_ids) for group in groups)
    return counts(prompt, sum(ticket.request.generated for group in groups for ticket in group))


def full(groups: Sequence[Sequence[Ticket]], shown: Details | None) -> dict[str, object]:
    """The usage of an answer that is no stream."""
    return {**_totals(groups), "prompt_tokens_details": shown, "completion_tokens_details": None}


def final(groups: Sequence[Sequence[Ticket]], shown: Details | None) -> dict[str, object]:
    """The usage in a stream's last chunk, which leaves out what is null."""
    usage = _totals(groups)
    if shown is not None:
        usage["prompt_tokens_details"] = {name: count for name, count in shown.items() if count is not None}
    return usage
