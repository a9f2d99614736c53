from __future__ import annotations

import pytest

from farm.errors import EvaluatorError
from workers.handlers.harbor.reward_files import rewards_of


@pytest.mark.parametrize(
    ("files", "rewards"),
    [
        ({"reward.txt": b"1"}, {"reward": 1.0}),
        ({"reward.txt": b" 0.25\n"}, {"reward": 0.25}),
        ({"reward.txt": b"-1e-3"}, {"reward": -0.001}),
        ({"reward.json": b'{"reward": true}'}, {"reward": 1.0}),
        ({"reward.json": b'{"reward": 1, "passed": 3}'}, {"reward": 1.0, "passed": 3.0}),
        ({"reward.json": b'{"correctness": false}'}, {"correctness": 0.0}),
        ({"reward.json": b'{"reward": 0}', "reward.txt": b"1"}, {"reward": 0.0}),
    ],
)
def test_rewards_are_read_as_harbor_reads_them(files: dict[str, bytes], rewards: dict[str, float]) -> None:
    assert rewards_of(files) == rewards


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"reward.txt": b""},
        {"reward.txt": b" \n"},
        {"reward.txt": b"one"},
        {"reward.txt": b"nan"},
        {"reward.txt": b"inf"},
        {"reward.txt": b"1e999"},
        {"reward.txt": b"\xff\xfe"},
        {"reward.txt": b"1" * 70_000},
        {"reward.json": b""},
        {"reward.json": b"{}"},
        {"reward.json": b"[1]"},
        {"reward.json": b"0.5"},
        {"reward.json": b"true"},
        {"reward.json": b'\xef\xbb\xbf{"reward": 1}'},
        {"reward.json": '{"reward": 1}'.encode("utf-16")},
        {"reward.json": b"null"},
        {"reward.json": b'"1"'},
        {"reward.json": b'{"reward": "1"}'},
        {"reward.json": b'{"reward": NaN}'},
        {"reward.json": b'{"reward": Infinity}'},
        {"reward.json": b'{"reward": 1e999}'},
        {"reward.json": b'{"reward": {"a": 1}}'},
        {"reward.json": b'{"reward": 1'},
        {"reward.json": b"1" + b"0" * 400},
        {"reward.json": b"[" * 60_000},
        # the other file does not replace a broken one
        {"reward.json": b"", "reward.txt": b"1"},
    ],
)
def test_invalid_reward_is_an_error_and_never_a_score(files: dict[str, bytes]) -> None:
    with pytest.raises(EvaluatorError, match=r"/logs/verifier"):
        rewards_of(files)
