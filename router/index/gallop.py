"""How far into a chain its blocks are held, without walking it."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def leading(keys: list[K], held: dict[K, V], guess: int = 0) -> int:
    """How many leading keys are held, where whatever is held has its ancestors held too. O(log n) look-ups; two or
    three where none or all are, or as many as `guess`."""
    whole = len(keys)
    if not whole or keys[0] not in held:
        return 0
    if keys[-1] in held:
        return whole
    low, high = 1, whole - 1  # keys[:low] are held; keys[high] is not
    if low <= guess <= high:
        if keys[guess - 1] not in held:
            high = guess - 1
        elif keys[guess] not in held:
            return guess
        else:
            low = guess + 1
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
