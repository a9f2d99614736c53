"""Every trainer adapter gives the rows that may train, each whole and with its reward: ours, and another package's.

An adapter of another trainer joins by its name and a function that reads its rows back.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farm import plugins
from farm.adapters.protocol import TrainerAdapter, training_rows
from farm.client.farm import ADAPTERS
from farm.errors import NotFound
from farm.records.rollout import Outcome, Rollout, Stage, State
from farm.records.trajectory import NO_VERSION, Segment, token_ids

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer_adapter"


@dataclass(frozen=True)
class ReadRow:
    """One row, read back from a trainer's format: the tokens of prompt and response, and what goes with each."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float


def read_arrays(rows: Any) -> list[ReadRow]:
    read = []
    for k in range(len(rows)):
        prompt = rows.prompt_ids[k][rows.prompt_mask[k] == 1].tolist()
        there = rows.attention_mask[k] == 1
        n = len(prompt)
        read.append(
            ReadRow(
                prompt + rows.response_ids[k][there].tolist(),
                [0] * n + rows.response_mask[k][there].tolist(),
                [0.0] * n + rows.response_logprobs[k][there].tolist(),
                [NO_VERSION] * n + rows.policy_versions[k][there].tolist(),
                float(rows.rewards[k]),
            )
        )
    return read


def read_packed(rows: Any) -> list[ReadRow]:
    bounds = list(zip(rows.row_starts[:-1], rows.row_starts[1:], strict=True))
    assert [position for start, end in bounds for position in range(end - start)] == rows.position_ids.tolist()
    return [
        ReadRow(
            rows.input_ids[start:end].tolist(),
            rows.loss_mask[start:end].tolist(),
            rows.old_logprobs[start:end].tolist(),
            rows.policy_versions[start:end].tolist(),
            float(reward),
        )
        for (start, end), reward in zip(bounds, rows.rewards, strict=True)
    ]


READERS: dict[str, Callable[[Any], list[ReadRow]]] = {"arrays": read_arrays, "packed": read_packed}


@pytest.fixture(scope="module", autouse=True)
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package of the example is built and installed, as that of anybody."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--target", str(site), str(EXAMPLE)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield
    sys.modules.pop("packed_rows", None)
    plugins.installed.cache_clear()
    plugins.load.cache_clear()


@pytest.fixture(params=READERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def adapter(name: str) -> TrainerAdapter[Any]:
    found: TrainerAdapter[Any] = plugins.load(ADAPTERS, name)
    return found


@pytest.fixture
def read(name: str) -> Callable[[Any], list[ReadRow]]:
    return READERS[name]


def segment(n_prompt: int, versions: Sequence[int], mismatch: int | None = None) -> Segment:
    """Each token sampled by one of these weights, NO_VERSION by unknown ones; 0 for a token that was put there."""
    n = len(versions)
    mask = np.array([version != 0 for version in versions], np.uint8)
    return Segment(
        token_ids(range(100, 100 + n_prompt)),
        token_ids(range(2**31 - n, 2**31)),
        mask,
        (mask * np.linspace(-3, -1e-6, n)).astype(np.float32),
        np.where(mask == 1, np.array(versions), NO_VERSION).astype(np.int32),
        mismatch,
    )


def rollout(number: int, segments: Sequence[Segment], **changed: Any) -> Rollout:
    played = Rollout(
        rollout_id=f"b.{number // 2}.{number % 2}",
        batch_id="b",
        group_index=number // 2,
        sample_index=number % 2,
        data_source="noop",
        instance_id="",
        stage=Stage.EVAL,
        state=State.COMPLETED,
        attempt=1,
        node=None,
        outcome=Outcome.SUBMITTED,
        reward=0.25 * number - 0.5,
        failure=None,
        n_turns=1,
        n_response_tokens=1,
        submitted_at=0.0,
        finished_at=1.0,
        finish_seq=number + 1,
        segments=tuple(segments),
    )
    return replace(played, **changed)


BRANCHED = (segment(3, [7, 7]), segment(4, [7, 0, 0, 8]), segment(1, [8]))
PLAYED = [
    rollout(0, [segment(2, [7, 7, 7])]),
    rollout(1, BRANCHED),
    rollout(2, [segment(2, [7])], reward=0.0, outcome=Outcome.DEADLINE),
    rollout(3, [segment(2, [7])], reward=None, outcome=Outcome.ENGINE_ERROR, state=State.FAILED),
    rollout(4, [segment(2, [7])], reward=None, outcome=Outcome.CANCELLED, state=State.CANCELLED),
    rollout(5, [segment(2, [7, 7], mismatch=3), segment(2, [0, 0]), segment(9, [6, 7])]),
    rollout(6, []),
    rollout(7, [segment(2, [NO_VERSION, 7])]),
    rollout(8, [segment(2, [7])], reward=1.0, outcome=Outcome.STALE, state=State.FAILED),
]


def wanted(rows: Iterator[tuple[Rollout, Segment]]) -> list[ReadRow]:
    return [
        ReadRow(
            [*each.prompt_ids.tolist(), *each.response_ids.tolist()],
            [0] * len(each.prompt_ids) + each.response_mask.tolist(),
            [0.0] * len(each.prompt_ids) + each.response_logprobs.tolist(),
            [NO_VERSION] * len(each.prompt_ids) + each.policy_versions.tolist(),
            float(np.float32(played.reward)),
        )
        for played, each in rows
    ]


def test_what_may_train_is_known() -> None:
    rows = [(played.rollout_id, len(each.prompt_ids)) for played, each in training_rows(PLAYED)]
    assert rows == [("b.0.0", 2), ("b.0.1", 3), ("b.0.1", 4), ("b.0.1", 1), ("b.1.0", 2), ("b.2.1", 9), ("b.3.1", 2)]
    rows = [(played.rollout_id, len(each.prompt_ids)) for played, each in training_rows(PLAYED, min_version=7)]
    assert rows == [("b.0.0", 2), ("b.0.1", 3), ("b.0.1", 4), ("b.0.1", 1), ("b.1.0", 2)]


def test_there_is_a_row_for_each_segment_that_may_train_and_no_other(
    adapter: TrainerAdapter[Any], read: Callable[[Any], list[ReadRow]]
) -> None:
    assert len(read(adapter(PLAYED))) == len(list(training_rows(PLAYED))) == 7


def test_tokens_masks_logprobs_versions_and_rewards_are_those_of_the_segments(
    adapter: TrainerAdapter[Any], read: Callable[[Any], list[ReadRow]]
) -> None:
    assert read(adapter(PLAYED)) == wanted(training_rows(PLAYED))


def test_rows_of_older_or_unknown_weights_are_left_out(
    adapter: TrainerAdapter[Any], read: Callable[[Any], list[ReadRow]]
) -> None:
    assert read(adapter(PLAYED, min_version=7)) == wanted(training_rows(PLAYED, min_version=7))
    assert read(adapter(PLAYED, min_version=9)) == []


def test_nothing_makes_no_rows(adapter: TrainerAdapter[Any], read: Callable[[Any], list[ReadRow]]) -> None:
    assert read(adapter([])) == []
    assert read(adapter(PLAYED[3:5])) == []


def test_the_rollouts_stay_as_they_were(adapter: TrainerAdapter[Any]) -> None:
    given = deepcopy(PLAYED)
    adapter(given)
    for before, after in zip(PLAYED, given, strict=True):
        assert replace(before, segments=()) == replace(after, segments=())
        for one, other in zip(before.segments, after.segments, strict=True):
            assert all(np.array_equal(getattr(one, each), getattr(other, each)) for each in one.__slots__)


def test_an_adapter_that_is_not_installed_is_named_with_those_that_are() -> None:
    with pytest.raises(NotFound, match=r"'none-such'.*arrays, packed"):
        plugins.load(ADAPTERS, "none-such")
