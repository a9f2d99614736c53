"""Segments are built from model calls by common prefix, and hold exactly the sampled tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.errors import InvalidRequest
from farm.records.trajectory import (
    NO_VERSION,
    ModelCall,
    Segment,
    VersionSpan,
    calls_of_segments,
    segments,
    segments_per_call,
    token_ids,
    token_versions,
    tools_by_call,
    version_number,
    version_range,
)


def call(
    index: int, prompt: list[int], response: list[int], version: str = "1", images: tuple[str, ...] = ()
) -> ModelCall:
    return ModelCall(
        index=index,
        messages=[],
        response={},
        finish_reason="stop",
        engine="e",
        started_at=0.0,
        latency_s=0.0,
        n_prompt_tokens=len(prompt),
        n_response_tokens=len(response),
        policy_version=version,
        prompt_ids=token_ids(prompt),
        response_ids=token_ids(response),
        response_logprobs=np.linspace(-1, -0.1, len(response), dtype=np.float32),
        images=images,
    )


def test_continued_conversation_is_one_row() -> None:
    (row,) = segments([call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5, 6], [7], version="2")])
    assert row.prompt_ids.tolist() == [1, 2]
    assert row.response_ids.tolist() == [3, 4, 5, 6, 7]
    assert row.response_mask.tolist() == [1, 1, 0, 0, 1]
    assert row.policy_versions.tolist() == [1, 1, NO_VERSION, NO_VERSION, 2]
    assert row.response_logprobs[2:4].tolist() == [0.0, 0.0]


def test_rewritten_history_starts_a_new_row() -> None:
    rows = segments([call(0, [1], [2, 3]), call(1, [1, 2, 9], [4])])
    assert [row.response_ids.tolist() for row in rows] == [[2, 3], [4]]


def test_branches_continue_the_row_they_came_from() -> None:
    calls = [call(0, [1], [2]), call(1, [8], [9]), call(2, [1, 2, 3], [4]), call(3, [8, 9, 7], [6])]
    assert [row.response_ids.tolist() for row in segments(calls)] == [[2, 3, 4], [9, 7, 6]]
    assert [[each.index for each in row] for row in calls_of_segments(calls)] == [[0, 2], [1, 3]]


def test_call_without_recorded_tools_has_those_of_the_call_it_continues() -> None:
    calls = [
        call(0, [1], [2]),
        call(1, [1, 2, 3], [4]),
        call(2, [1, 2, 9], [5]),
        call(3, [7], [8]),
        call(4, [7, 8], []),
    ]
    look_tool, put_tool = {"function": {"name": "look"}}, {"function": {"name": "put"}}
    calls[0].tools, calls[3].tools = [look_tool], [put_tool]
    # a row may begin with a call that continues a call outside all rows
    calls[0].response_logprobs = None
    assert [[each.index for each in row] for row in calls_of_segments(calls)] == [[1], [2], [3, 4]]
    assert tools_by_call(calls) == {0: [look_tool], 1: [look_tool], 2: [look_tool], 3: [put_tool], 4: [put_tool]}


def test_tools_that_are_not_recorded_are_empty() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4])]
    calls[1].prompt_ids = None
    assert tools_by_call(calls) == {0: [], 1: []}


def test_call_without_ids_trains_nothing() -> None:
    plain = call(0, [1], [2])
    plain.response_logprobs = None
    assert segments([plain]) == ()


def test_call_continues_the_row_with_the_longest_prefix() -> None:
    rows = segments([call(0, [1], [2, 3]), call(1, [1], [2]), call(2, [1, 2, 3, 4], [5])])
    assert [row.response_ids.tolist() for row in rows] == [[2, 3, 4, 5], [2]]


def test_version_of_a_token_is_that_of_its_span_or_of_its_call() -> None:
    cut = call(0, [1], [2, 3, 4], version="1")
    cut.versions = (VersionSpan("2", 1, 2), VersionSpan("x", 2, 3))
    assert token_versions(cut).tolist() == [1, 2, NO_VERSION]
    assert segments([cut])[0].policy_versions.tolist() == [1, 2, NO_VERSION]
    assert version_range([cut, call(1, [9], [9], version="7")]) == (1, 7)
    assert version_range([call(0, [1], [], version="3"), call(1, [1], [2], version="v3")]) == (None, None)


@pytest.mark.parametrize(
    ("version", "number"),
    [("0", 0), ("007", 7), ("2147483647", 2147483647), *((text, NO_VERSION) for text in ("", "-1", "1.0", "default"))],
)
def test_numeric_version_is_a_number(version: str, number: int) -> None:
    assert version_number(version) == number


@pytest.mark.parametrize("version", ["2147483648", "20260101120000", "9" * 5000, "\u0663", "\u00b2"])
def test_version_too_large_for_a_column_has_no_number(version: str) -> None:
    assert version_number(version) == NO_VERSION


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Segment(token_ids([1]), token_ids([1, 2]), np.ones(1, np.uint8), np.ones(2, np.float32), token_ids([1, 1]))


ids = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@given(prompt=ids, turns=st.lists(st.tuples(ids, st.lists(st.integers(0, 50), max_size=6)), min_size=1, max_size=6))
def test_every_sampled_token_is_in_the_row_once(prompt: list[int], turns: list[tuple[list[int], list[int]]]) -> None:
    calls, history = [], list(prompt)
    for index, (response, observation) in enumerate(turns):
        calls.append(call(index, list(history), response))
        history += response + observation
    (row,) = segments(calls)
    whole = row.prompt_ids.tolist() + row.response_ids.tolist()
    assert whole == history[: len(whole)]
    sampled = row.response_ids[row.response_mask == 1].tolist()
    assert sampled == [token for response, _ in turns for token in response]
    assert np.all(row.response_logprobs[row.response_mask == 0] == 0)
    assert np.all(row.response_logprobs[row.response_mask == 1] < 0)


def test_row_lists_its_images_in_order_of_position() -> None:
    first, second = call(0, [1, 9], [3], images=("a",)), call(1, [1, 9, 3, 9, 9, 5], [7], images=("a", "b", "a"))
    (row,) = segments([first, second])
    assert row.images == ("a", "b", "a")
    assert [each.images for each in segments_per_call([first, second])] == [("a",), ("a", "b", "a")]
    assert row.masked().images == row.images
    assert segments([call(0, [1], [2])])[0].images == ()


def test_equal_ids_with_different_images_are_another_row() -> None:
    first, other = call(0, [1, 9], [3], images=("a",)), call(1, [1, 9, 3, 5], [7], images=("b",))
    again = call(2, [1, 9, 3, 5, 7, 6], [8], images=("b",))
    assert [row.images for row in segments([first, other, again])] == [("a",), ("b",)]
    assert [len(row) for row in calls_of_segments([first, other, again])] == [1, 2]
    first.tools, other.tools = [{"name": "x"}], None
    assert tools_by_call([first, other]) == {0: [{"name": "x"}], 1: []}


def test_row_with_images_is_not_cut() -> None:
    (row,) = segments([call(0, [1, 9], [3, 4], images=("a",))])
    assert row.cut(2) is row
    with pytest.raises(InvalidRequest, match="a row with images has a response of 2 tokens, and cannot be cut to 1"):
        row.cut(1)
