"""The choice of engine for a call, for any load of the engines."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from workers.policy.routing.load import Candidate, choose

URLS = [f"http://e{i}/v1" for i in range(6)]
fleets = st.lists(st.tuples(st.integers(0, 100_000), st.floats(1.0, 1e4)), min_size=1, max_size=len(URLS)).map(
    lambda found: [Candidate(url, *each) for url, each in zip(URLS, found, strict=False)]
)


def waiting(each: Candidate, n_tokens: int) -> float:
    return (each.n_tokens + n_tokens) / each.speed


@given(fleets, st.integers(1, 10_000), st.text(max_size=5), st.sampled_from(["", *URLS]))
def test_choice_is_never_much_worse_than_the_best(fleet: list[Candidate], n_tokens: int, group: str, stay: str) -> None:
    chosen = next(each for each in fleet if each.url == choose(fleet, n_tokens, group, stay))
    best = min(waiting(each, n_tokens) for each in fleet)
    fastest = max(each.speed for each in fleet)
    has_room = chosen.n_tokens < 8 * n_tokens and chosen.speed >= fastest / 2
    assert waiting(chosen, n_tokens) <= 3 * best or has_room


@given(fleets, st.integers(1, 10_000), st.text(max_size=5), st.randoms())
def test_order_of_the_list_does_not_matter(fleet: list[Candidate], n: int, group: str, random: object) -> None:
    mixed = list(fleet)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert choose(mixed, n, group) == choose(fleet, n, group)


def test_groups_spread_over_engines_and_few_move_when_one_is_removed() -> None:
    fleet = [Candidate(url, 0, 1.0) for url in URLS]
    before = {group: choose(fleet, 1, f"g{group}") for group in range(600)}
    assert min(Counter(before.values()).values()) > 60
    after = {group: choose(fleet[1:], 1, f"g{group}") for group in range(600)}
    assert all(after[group] == url for group, url in before.items() if url != URLS[0])


def test_load_is_measured_in_tokens_and_speed() -> None:
    assert choose([Candidate("a", 1000, 1.0), Candidate("b", 5000, 1.0)], 100, "g") == "a"
    assert choose([Candidate("a", 1000, 1.0), Candidate("b", 2000, 4.0)], 100, "g") == "b"


def test_rollout_moves_only_when_another_engine_is_far_less_loaded() -> None:
    for n_tokens, stays in ((2500, True), (3500, False)):
        fleet = [Candidate("home", n_tokens, 1.0), Candidate("other", 1000, 1.0)]
        assert (choose(fleet, 100, "g", stay="home") == "home") is stays


def test_idle_but_much_slower_engine_is_not_chosen() -> None:
    fleet = [Candidate("slow", 0, 1.0), Candidate("fast", 0, 4.0)]
    assert {choose(fleet, 100, f"g{group}", stay="slow") for group in range(20)} == {"fast"}
