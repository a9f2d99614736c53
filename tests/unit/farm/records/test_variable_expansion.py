"""Variables in a task's tables are expanded only from its batch's secrets."""

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
def test_values_are_expanded_once(value: str, result: str) -> None:
    assert expanded({"x": value}, SECRETS) == {"x": result}


def test_all_missing_names_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_whole_value_variables_are_expanded_like_harbor(value: str, result: str) -> None:
    assert expanded({"x": value}, SECRETS, whole=True) == {"x": result}
