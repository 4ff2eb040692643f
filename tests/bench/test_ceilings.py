"""The ceilings on runs small enough to work out by hand, with blocks of 4 tokens."""

import pytest

from bench.ceilings import Ceilings, Exchange, ceilings


def tokens(*blocks: int) -> tuple[int, ...]:
    """Four tokens a block, told apart by the block's number."""
    return tuple(token for block in blocks for token in range(10 * block, 10 * block + 4))


def ask(*blocks: int, answer: tuple[int, ...] = ()) -> Exchange:
    return Exchange(tokens(*blocks), answer)


def rates(run: list[Exchange], *, replicas: int = 2, pool_blocks: int = 100) -> Ceilings:
    return ceilings(run, block_size=4, replicas=replicas, pool_blocks=pool_blocks)


def test_nothing_asked_is_no_hit() -> None:
    assert rates([]) == Ceilings(0.0, 0.0, 0.0)


def test_the_last_token_of_a_prompt_is_always_recomputed() -> None:
    # 8 tokens twice: (8 - 1) // 4 = 1 block can hit, although both are held.
    assert rates([ask(1, 2), ask(1, 2)]) == Ceilings(4 / 16, 4 / 16, 4 / 16)
    # With a ninth token both do.
    nine = Exchange((*tokens(1, 2), 99), ())
    assert rates([nine, nine]) == Ceilings(8 / 18, 8 / 18, 8 / 18)


def test_only_the_prefix_from_the_first_block_counts() -> None:
    assert rates([ask(1, 2, 3), ask(9, 2, 3)]).infinite == 0.0
    assert rates([ask(1, 2, 3), ask(1, 9, 3)]).infinite == 4 / 24


def test_an_answers_blocks_are_hit_by_the_next_turn_save_its_last_token() -> None:
    # Prompt 4 tokens, answer 5: 8 of the 9 were computed, so block 2 is full and held.
    first = Exchange(tokens(1), (*tokens(2), 50))
    assert rates([first, ask(1, 2, 3)]).infinite == 8 / 16
    # An answer of 4: its last token was sampled, never computed, so block 2 is not.
    shorter = Exchange(tokens(1), tokens(2))
    assert rates([shorter, ask(1, 2, 3)]).infinite == 4 / 16


def test_a_partial_block_is_never_held() -> None:
    assert rates([Exchange((1, 2, 3), ()), Exchange((1, 2, 3), ())]).infinite == 0.0


def test_a_pool_forgets_the_least_recent_first_and_tails_before_heads() -> None:
    # One pool of 3. (1 2 3), then (7): 3, the tail of the first, gives way; then 1 2 still hit.
    run = [ask(1, 2, 3), ask(7), ask(1, 2, 3)]
    assert rates(run, replicas=1, pool_blocks=3) == Ceilings(8 / 28, 8 / 28, 8 / 28)
    # (7 8) pushes out 3 and 2: one block hits, where an infinite cache has two.
    run = [ask(1, 2, 3), ask(7, 8), ask(1, 2, 3)]
    assert rates(run, replicas=1, pool_blocks=3) == Ceilings(8 / 32, 4 / 32, 4 / 32)


def test_a_hit_makes_blocks_recent_again() -> None:
    # Pool of 2. The second ask of (1) keeps it over (2), so that (3) pushes out (2).
    run = [ask(1), ask(2), Exchange((*tokens(1), 99), ()), ask(3), Exchange((*tokens(1), 99), ())]
    assert rates(run, replicas=1, pool_blocks=2).pooled_lru == 8 / 22
    without = [ask(1), ask(2), ask(3), Exchange((*tokens(1), 99), ())]
    assert rates(without, replicas=1, pool_blocks=2).pooled_lru == 0.0


def test_the_pooled_cache_is_as_large_as_all_pools_together() -> None:
    run = [ask(1, 2, 3, 4), ask(1, 2, 3, 4)]
    assert rates(run, replicas=1, pool_blocks=2).pooled_lru == 8 / 32
    assert rates(run, replicas=2, pool_blocks=2).pooled_lru == 12 / 32


def test_the_oracle_follows_the_longest_match_and_breaks_ties_by_requests() -> None:
    # (1 ..) to replica 0; (5 ..) matches nowhere, so to replica 1 which has fewer requests; each next turn follows.
    run = [ask(1), ask(5), ask(1, 2), ask(5, 6), ask(1, 2, 3), ask(5, 6, 7)]
    # Replicas of 3 blocks hold one conversation each; together in one pool of 3 they'd push each other out.
    assert rates(run, replicas=2, pool_blocks=3).greedy_oracle == 24 / 48
    assert rates(run, replicas=1, pool_blocks=3).greedy_oracle < 24 / 48


def test_the_oracle_never_spreads_a_shared_prefix() -> None:
    # All share block 1: greedy sends all to one replica, whose pool of 3 then thrashes; two pools in one would not.
    run = [ask(1, 2, 20), ask(1, 3, 30), ask(1, 2, 20), ask(1, 3, 30)]
    result = rates(run, replicas=2, pool_blocks=3)
    assert result.infinite == result.pooled_lru == (4 + 8 + 8) / 48
    assert result.greedy_oracle == 12 / 48


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_no_ceiling_is_above_the_infinite_one(replicas: int) -> None:
    run = [ask(1, number % 3, number % 5, number) for number in range(40)]
    found = rates(run, replicas=replicas, pool_blocks=6)
    assert found.greedy_oracle <= found.infinite
    assert found.pooled_lru <= found.infinite
