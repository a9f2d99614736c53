"""The last answer between tags in a text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.environments.answer_tags import MAX_CHARS, last_tagged

pieces = st.lists(st.sampled_from(["<answer>", "</answer>", " a ", "\n", "<answer", "1"]), max_size=12).map("".join)


@given(pieces)
def test_last_answer_equals_that_of_a_regular_expression(text: str) -> None:
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert last_tagged(text) == (found[-1].strip() if found else None)


@pytest.mark.parametrize("text", ["<answer>" * 130_000, "</answer>" * 130_000, "<answer></answer" * 70_000])
def test_text_without_a_pair_has_no_answer(text: str) -> None:
    assert last_tagged(text) is None


def test_end_of_a_long_text_is_searched() -> None:
    assert last_tagged("<answer>1</answer>" + " " * MAX_CHARS) is None
    assert last_tagged("x" * 1_000_000 + "<answer>1</answer>") == "1"
