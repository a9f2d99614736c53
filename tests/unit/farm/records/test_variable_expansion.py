"""Variables of a task's tables come from its batch's secrets, and from nowhere else."""

from __future__ import annotations

import pytest

from farm.errors import InvalidRequest
from farm.records.variable_expansion import expanded

SECRETS = {"KEY": "k${OTHER}", "EMPTY": ""}


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ("plain $HOME {KEY} $KEY", "plain $HOME {KEY} $KEY"),
        ("a${KEY}b", "ak${OTHER}b"),
        ("${NONE:-default}", "default"),
        ("${NONE:-}", ""),
        ("${EMPTY:-default}", "default"),
        ("${EMPTY}", ""),
        ("${KEY:-default}${KEY}", "k${OTHER}k${OTHER}"),
    ],
)
def test_values_are_replaced_once(value: str, result: str) -> None:
    assert expanded({"x": value}, SECRETS) == {"x": result}


def test_names_that_are_missing_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME_SECRET", "never")
    with pytest.raises(InvalidRequest, match="no secret for: HOME_SECRET, OTHER"):
        expanded({"x": "${HOME_SECRET}", "y": "${OTHER} ${KEY}"}, SECRETS)


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ("${KEY}", "k${OTHER}"),
        ("${NONE:-default}", "default"),
        ("${EMPTY:-default}", ""),
        ("a${KEY}b", "a${KEY}b"),
        ("/x:${PATH}", "/x:${PATH}"),
        ("${NONE:-${KEY}}", "${KEY}"),
    ],
)
def test_a_value_that_is_a_variable_as_a_whole_is_replaced_as_harbor_does(value: str, result: str) -> None:
    assert expanded({"x": value}, SECRETS, whole=True) == {"x": result}
