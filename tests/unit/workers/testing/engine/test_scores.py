"""Log-probabilities and the prefix cache: values that the double computes only from ids."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from farm.records.trajectory import TokenIds, token_ids
from workers.testing.engine.scheduler import PrefixCache
from workers.testing.engine.simulated_values import scored

IDS = arrays.arrays(np.int32, st.integers(0, 200), elements=st.integers(0, 700))


@given(IDS, st.integers(0, 200))
def test_part_is_scored_as_in_the_whole(ids: TokenIds, start: int) -> None:
    whole = scored(ids, 0, "1", 0)
    assert len(whole) == len(ids)
    assert (whole < 0).all()
    assert np.array_equal(scored(ids, start, "1", 0), whole[start:])
    assert np.array_equal(scored(ids[:start], 0, "1", 0), whole[:start])


def test_weights_and_seeds_give_different_scores() -> None:
    ids = token_ids(range(50))
    first = scored(ids, 0, "1", 0)
    assert not np.isclose(first, scored(ids, 0, "2", 0)).any()
    assert not np.isclose(first, scored(ids, 0, "1", 1)).any()


@given(IDS, IDS)
def test_common_prefix_is_found_in_whole_blocks(one: TokenIds, other: TokenIds) -> None:
    cache = PrefixCache()
    cache.keep(one)
    prompt = np.concatenate([one, other])
    expected = min(len(one) // 16 * 16, max(len(prompt) - 1, 0) // 16 * 16)
    result = cache.look(prompt)
    assert result >= expected
    assert (cache.n_queries, cache.n_hits) == (len(prompt), result)


def test_prefix_ends_at_the_first_difference() -> None:
    cache, ids = PrefixCache(), token_ids(range(100))
    cache.keep(ids)
    assert cache.look(ids) == 96
    changed = ids.copy()
    changed[40] += 1
    assert cache.look(changed) == 32
    assert cache.look(ids[16:]) == 0
    assert cache.look(ids[:96]) == 80


def test_unused_entries_are_evicted() -> None:
    cache, used, unused = PrefixCache(size_tokens=320), token_ids(range(0, 100)), token_ids(range(100, 200))
    cache.keep(unused)
    for index in range(20):
        assert cache.look(used) == (96 if index else 0)
        cache.keep(used)
        cache.keep(token_ids(range(200 + index, 264 + index)))
    assert cache.look(unused) == 0
    assert 0.5 <= cache.usage <= 1.0


def test_salts_separate_caches_and_clearing_empties_them() -> None:
    cache, ids = PrefixCache(), token_ids(range(100))
    cache.keep(ids, "a")
    assert (cache.look(ids, "b"), cache.look(ids), cache.look(ids, "a")) == (0, 0, 96)
    cache.clear()
    assert cache.look(ids, "a") == 0
