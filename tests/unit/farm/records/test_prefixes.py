"""The longest known prefix of a prompt is found among any other known sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from farm.records.prefixes import Prefixes, last_hash, prefix_hashes
from farm.records.trajectory import token_ids

sequences = st.lists(st.integers(0, 2), max_size=6)


@given(known=st.lists(sequences, max_size=20), prompt=sequences, before=st.none() | st.integers(0, 20))
def test_longest_and_newest_prefix_is_found(known: list[list[int]], prompt: list[int], before: int | None) -> None:
    prefixes = Prefixes()
    for number, ids in enumerate(known):
        prefixes.put(number, token_ids(ids))
    allowed = range(len(known) if before is None else min(before, len(known)))
    fitting = [(len(known[number]), number) for number in allowed if prompt[: len(known[number])] == known[number]]
    assert prefixes.longest(token_ids(prompt), before) == (max(fitting)[1] if fitting else None)


def test_sequence_can_be_replaced() -> None:
    prefixes = Prefixes()
    for number in range(9):
        prefixes.put(number, token_ids([1, number + 2]))
    assert prefixes.longest(token_ids([1, 2, 3])) == 0
    prefixes.put(0, token_ids([1, 2, 3, 4]))
    assert prefixes.longest(token_ids([1, 2, 3])) is None
    assert prefixes.longest(token_ids([1, 2, 3, 4])) == 0


@given(first=st.lists(st.integers(-1, 2**31 - 1)), second=st.lists(st.integers(-1, 2**31 - 1)))
def test_hash_covers_the_ids_up_to_its_position(first: list[int], second: list[int]) -> None:
    whole = prefix_hashes(token_ids(first + second))
    assert np.array_equal(whole[: len(first)], prefix_hashes(token_ids(first)))
    if first != second:
        assert (len(first), last_hash(whole[: len(first)])) != (
            len(second),
            last_hash(prefix_hashes(token_ids(second))),
        )


def test_equal_ids_with_different_images_are_distinguished() -> None:
    prefixes = Prefixes()
    prefixes.put(0, token_ids([1, 9]), ("a",))
    prefixes.put(1, token_ids([1]))
    prompt = token_ids([1, 9, 9])
    assert prefixes.longest(prompt, images=("a", "b")) == 0
    assert prefixes.longest(prompt, images=("b", "a")) == 1
    assert prefixes.longest(prompt) == 1
