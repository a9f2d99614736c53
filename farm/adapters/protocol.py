"""The protocol of trainer adapters: objects that convert ended rollouts to one trainer's rows, and read them back.

`Farm.rows` finds an adapter by its name in the entry point group `farm.adapters`, so a separate package may provide
one:

    [project.entry-points."farm.adapters"]
    my_trainer = "my_package:rows"

Every adapter makes these promises, tested by `farm doctor --adapter NAME` (`farm.adapters.conformance`):

* one row for each segment of `training_rows`, in that order, and no other; or, if `rows_per_rollout` is `one`, one row
  for each rollout with such a segment, made from one of them;
* token ids, mask, log-probabilities and versions are those of the segment, aligned with each other however they are
  padded, packed or renamed; log-probabilities for all rows or for none;
* each row has the reward of its rollout, and its images if it has any, or else raises an error (`training_rows`);
* the given rollouts are not changed, and no rollouts make no rows.

`examples/trainer_adapter/` is a complete package with one.

A trainer that takes one result for each rollout, and that may keep the tokens itself, has a `ResultAdapter` in the same
group. It makes these promises, tested by the same command:

* a rollout that may train has its own reward; one that failed, was cancelled or is stale has none, even if it had one
  before, and an error that names it;
* each outcome caused by the policy has a stop reason; limits have other reasons than natural ends, and failures others;
* tokens, masks and log-probabilities, if a result has them, are those of the segments that may train.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from farm.errors import InvalidRequest
from farm.records.rollout import Rollout
from farm.records.trajectory import ModelCall, Segment

Rows = TypeVar("Rows")
Result = TypeVar("Result")
RowsPerRollout: TypeAlias = Literal["every", "one"]


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One row of a trainer's format, read back as plain values.

    `response_ids`, `response_mask` and, if the format has them, `logprobs` and `versions` have one length. A format
    that does not show where the prompt ends has everything in the response, with mask 0 and log-probability 0.0 for the
    prompt. `reward` is None for a row that states it has none, `rollout_id` is empty in a format without a field for
    it.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    reward: float | None
    versions: tuple[int, ...] | None = None
    rollout_id: str = ""


class TrainerAdapter(Protocol[Rows]):
    """A callable object with these arguments; its own options are further keyword arguments with defaults."""

    @property
    def rows_per_rollout(self) -> RowsPerRollout:
        """`every`: a row for each segment that may train; `one`: one row for each rollout that has any."""

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> Rows:
        """Return the rows of these rollouts; `min_version` as in `training_rows`."""

    def read(self, rows: Rows, /) -> Sequence[TrainingRow]:
        """Return the rows of the trainer's format as plain values, in their order."""


@dataclass(frozen=True, slots=True)
class TrainerResult:
    """A trainer's result of a rollout, read back as plain values.

    `ended` is False, with the reason in `error`, for a rollout without a score. `rows` are its training rows, None if
    the trainer keeps tokens itself. `versions` are the oldest and the newest weights that sampled it, None in a format
    without them; `rollout_id` is empty in a format without a field for it.
    """

    ended: bool
    reward: float | None
    stop_reason: str
    error: str = ""
    rows: tuple[TrainingRow, ...] | None = None
    versions: tuple[int | None, int | None] | None = None
    rollout_id: str = ""


class ResultAdapter(Protocol[Result]):
    """An object that makes one trainer's result of a rollout, and reads it back."""

    def result(self, rollout: Rollout, calls: Sequence[ModelCall], /) -> Result:
        """Return the trainer's result of an ended rollout with these model calls."""

    def read_result(self, result: Result, /) -> TrainerResult:
        """Return a result as plain values."""


def gives_results(adapter: Any) -> bool:
    """Return whether an adapter is a `ResultAdapter`, which makes no rows."""
    return hasattr(adapter, "read_result")


def check_text_only(rollout_id: str, segment: Segment) -> None:
    """Raise InvalidRequest for a row with images, for formats without a field for them."""
    if segment.images:
        raise InvalidRequest(
            f"rollout {rollout_id} has a training row with {len(segment.images)} images, but this trainer's rows have "
            "no field for them: train on `Segment.images` in your own loop, or run with agent_requests.images "
            "`text`",
            field="agent_requests.images",
        )


def training_rows(
    rollouts: Sequence[Rollout], min_version: int | None = None, *, with_images: bool = False
) -> Iterator[tuple[Rollout, Segment]]:
    """Yield the segments that may train, each with its rollout, in order.

    Leaves out rollouts that failed or were not scored, and segments that are not token-exact or have no sampled token.
    With `min_version`, also those with a token sampled by older or unknown weights. Raises InvalidRequest for a segment
    with images, unless the caller says that it passes them on.
    """
    for rollout in rollouts:
        for segment in rollout.segments if rollout.trainable else ():
            if segment.trainable and (min_version is None or segment.version_span[0] >= min_version):
                if not with_images:
                    check_text_only(rollout.rollout_id, segment)
                yield rollout, segment
