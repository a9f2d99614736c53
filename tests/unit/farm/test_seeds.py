"""Random draws depend only on their position in a request."""

from __future__ import annotations

from itertools import product

from farm.seeds import call_seed, part_seed, rollout_seed

FIELDS = {"question": "1 + 1?", "x": [1, 2.5, None]}


def seed(base: int = 7, source: str = "math", group: int = 0, sample: int = 0, **fields: object) -> int:
    return rollout_seed(base, source, FIELDS | fields, group, sample)


def test_draws_of_a_batch_are_distinct() -> None:
    draws = [
        part_seed(call_seed(seed(base, group=group, sample=sample), number), n_tokens)
        for base, group, sample, number, n_tokens in product((7, 8), range(20), range(8), range(10), (0, 1, 17))
    ]
    assert len(set(draws)) == len(draws)
    assert all(0 <= draw < 2**63 for draw in draws)


def test_neighbouring_seeds_do_not_overlap() -> None:
    assert not {seed(7, sample=k) for k in range(64)} & {seed(8, sample=k) for k in range(64)}


def test_each_part_of_a_request_changes_the_seed() -> None:
    draws = [seed(), seed(8), seed(source="code"), seed(group=1), seed(sample=1), seed(x=3), seed(question="")]
    assert len(set(draws)) == len(draws)


def test_same_request_draws_the_same_in_every_process() -> None:
    assert seed() == rollout_seed(7, "math", dict(reversed(FIELDS.items())), "0", 0) == 2009829275328980282
    assert call_seed(seed(), 0) == part_seed(seed(), 0) == seed()
    assert (call_seed(5, 1), part_seed(5, 1)) == (7830117602261054666, 1631799205752104716)
