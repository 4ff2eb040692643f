"""How far into a chain its blocks are held, without walking it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence


def leading(keys: Sequence[int], held: Container[int]) -> int:
    """How many leading keys are held, where whatever is held has its ancestors held too. O(log n) look-ups."""
    low, high = 0, len(keys)  # keys[:low] are held; keys[high] is not, where there is one
    step = 1
    while low + step <= high and keys[low + step - 1] in held:
        low += step
        step *= 2
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
