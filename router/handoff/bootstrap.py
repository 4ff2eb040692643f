"""Asks Mooncake's prefill replicas which engines they are (GET /query on their bootstrap port)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

from router.handoff.connector import WrongParametersError
from router.handoff.mooncake import read_query

if TYPE_CHECKING:
    from router.config import Address
    from router.handoff.connector import Origin

MAX_PAGE_BYTES = 1024 * 1024


async def engines(
    session: aiohttp.ClientSession, address: Address, port: int, timeout_seconds: float
) -> dict[int, Origin]:
    """The engines of a replica, by data-parallel rank. Raises WrongParametersError where it does not tell them."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    bootstrap = f"http://{host}:{port}"
    try:
        async with session.get(f"{bootstrap}/query", timeout=aiohttp.ClientTimeout(total=timeout_seconds)) as response:
            page = await response.content.read(MAX_PAGE_BYTES)
            if response.status != 200:
                raise WrongParametersError(f"{bootstrap}/query answered {response.status} (mooncake_bootstrap_port)")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = str(error) or "no answer in time"
        raise WrongParametersError(f"{bootstrap}/query: {why} (mooncake_bootstrap_port)") from None
    return read_query(page, bootstrap)
