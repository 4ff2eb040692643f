"""What a router tells people when it has started: where it listens, whom it serves, how it reads prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.fleet.replica import Role, State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.config import Settings
    from router.feeds import Feeds
    from router.fleet.discovery import Fleet
    from router.fleet.replica import Replica
    from router.prompt.readers import Readers

# The most that one block takes in the index (CPython 3.11 to 3.13): one that is presumed, where each prompt has but one
# of its own and waits for its answer. Most take far less: docs/tuning.md.
BLOCK_BYTES = 600


def announcement(
    settings: Settings,
    fleet: Fleet,
    readers: Readers,
    feeds: Feeds | None,
    *,
    listens: str,
    admin: str | None,
    shared: str | None,
) -> str:
    """The start-up block. `listens` and `admin` are URLs, `shared` says what is shared with whom; None: nothing is."""
    lines = [f"warmroute listens on {listens}  (policy: {settings.choice.policy})"]
    if admin is not None:
        lines.append(f"  admin side on {admin}")
    lines.append("  replicas")
    for replica in fleet:
        lines += _replica(settings, fleet, feeds, replica)
    if fleet.divided:
        handoff = settings.handoff
        link = handoff.kv_link or "a link to be measured"
        lines.append(f"  prompts are split between them: {handoff.split}; KV by {handoff.connector} over {link}")
    lines.append("  models")
    lines += list(_models(fleet, readers)) or ["    none known yet"]
    if shared is not None:
        lines.append(f"  shared  {shared}")
    lines.append(_bounds(settings, fleet))
    return "\n".join(lines)


def does(replica: Replica) -> str:
    """Its role, for people."""
    return "prefill and decode" if replica.role is Role.BOTH else replica.role.value


def _replica(settings: Settings, fleet: Fleet, feeds: Feeds | None, replica: Replica) -> Iterable[str]:
    role = f" ({does(replica)})" if fleet.divided else ""
    if replica.state is not State.READY:
        every = settings.fleet.probe_seconds
        yield f"    {replica.name}{role}  {replica.state.value} ({replica.why}); asked again every {every:g} s"
        return
    cache = replica.cache
    held = (
        f"{cache.capacity or settings.choice.default_pool_blocks} blocks of {replica.block_size} tokens, "
        f"{replica.algorithm}{'' if cache.prefix_caching else ', PREFIX CACHING IS OFF'}"
    )
    told = cache.capacity and cache.block_size and cache.algorithm
    yield (
        f"    {replica.name}{role}  ready: {', '.join(replica.models)}; "
        f"{held if told else f'its metrics do not tell of its cache: assumed {held}'}"
    )
    if feeds is not None:
        yield f"      cache contents: {feeds.describe(replica.name)}"


def _models(fleet: Fleet, readers: Readers) -> Iterable[str]:
    models: dict[str, str] = {}
    for replica in fleet.ready():
        for card in replica.models.values():
            if card.parent is None:
                length = f", up to {card.max_model_len} tokens" if card.max_model_len else ""
                models[card.id] = f"{readers[card.id].mode}{length}"
    for name, mode in models.items():
        hint = "" if mode.startswith("tokens") else "; --tokenizer DIR makes predictions exact"
        yield f"    {name}  read as {mode}{hint}"


def _bounds(settings: Settings, fleet: Fleet) -> str:
    choice, listen = settings.choice, settings.listen
    blocks = sum(min(replica.cache.capacity or choice.default_pool_blocks, choice.max_pool_blocks) for replica in fleet)
    return (
        f"  memory bounds: index {blocks} blocks, up to {blocks * BLOCK_BYTES / 2**20:.0f} MiB; "
        f"prompts {settings.prompt.prompt_memory_bytes / 2**20:.0f} MiB; "
        f"request bodies {listen.max_buffered_bytes / 2**20:.0f} MiB, "
        f"each up to {listen.max_body_bytes / 2**20:.0f} MiB; {listen.max_connections} connections"
    )
