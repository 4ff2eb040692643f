"""How far into a chain its blocks are held, without walking it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

K = TypeVar("K")
V = TypeVar("V")


def leading(keys: Sequence[K], held: dict[K, V]) -> int:
    """How many leading keys are held, where whatever is held has its ancestors held too. O(log n) look-ups; two where
    none or all are."""
    whole = len(keys)
    if not whole or keys[0] not in held:
        return 0
    if keys[-1] in held:
        return whole
    low, high = 1, whole - 1  # keys[:low] are held; keys[high] is not
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low


def common(one: Sequence[int], other: Sequence[int], at: int = 0) -> int:
    """How many leading keys of `one` are those of `other` from its place `at` on. A key names all that comes before it:
    if the last ones are the same, all are; else O(log n) comparisons."""
    most = min(len(one), len(other) - at)
    if most and one[most - 1] == other[at + most - 1]:
        return most
    low, high = 0, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
