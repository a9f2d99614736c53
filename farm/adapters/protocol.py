"""The protocol of trainer adapters: functions that turn finished rollouts into the rows of one trainer.

An adapter has a name in the entry point group `farm.adapters`, which `Farm.rows` looks up, so a package of its own may
bring one:

    [project.entry-points."farm.adapters"]
    my_trainer = "my_package:rows"

Every adapter promises, and `tests/contract/test_adapters.py` holds it to that:

* one row for each segment of `training_rows`, in that order, and no other;
* token ids, mask, log-probabilities and versions as they are in the segment, aligned with each other however they are
  padded, packed or renamed;
* with each row the reward of its rollout;
* rollouts that it was given stay as they were, and no rollouts make no rows.

`examples/trainer_adapter/` is a whole package with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from farm.records.rollout import Rollout
from farm.records.trajectory import Segment

Rows_co = TypeVar("Rows_co", covariant=True)


class TrainerAdapter(Protocol[Rows_co]):
    """A function with these arguments; options of its own are further keyword arguments with defaults."""

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> Rows_co:
        """Return the rows of these rollouts; `min_version` as in `training_rows`."""


def training_rows(rollouts: Sequence[Rollout], min_version: int | None = None) -> Iterator[tuple[Rollout, Segment]]:
    """Yield the segments that may train, each with its rollout, in order.

    Rollouts that the farm broke or nothing scored are left out, and segments that are not token-exact or in which
    nothing was sampled. With `min_version`, so are those of which a token was sampled by older weights, or by weights
    not known.
    """
    for rollout in rollouts:
        for segment in rollout.segments if rollout.trainable else ():
            if segment.trainable and (min_version is None or segment.version_span[0] >= min_version):
                yield rollout, segment
