"""An ended rollout with one segment. Imported by environments without pytest, too."""

from __future__ import annotations

import numpy as np

from farm.records.rollout import Failure, Outcome, Rollout, Stage, State
from farm.records.trajectory import Segment, token_ids


def rollout(group: int, sample: int, n: int, reward: float | None = 1.0) -> Rollout:
    segment = Segment(
        token_ids(range(1, group + 3)),
        token_ids(range(10, 10 + n)),
        np.ones(n, np.uint8),
        np.full(n, -0.5, np.float32),
        np.full(n, 7, np.int32),
    )
    broken = reward is None
    return Rollout(
        rollout_id=f"b.{group}.{sample}",
        batch_id="b",
        group_index=group,
        sample_index=sample,
        data_source="noop",
        instance_id="",
        stage=Stage.EVAL,
        state=State.FAILED if broken else State.COMPLETED,
        attempt=1,
        node=None,
        outcome=Outcome.ENGINE_ERROR if broken else Outcome.SUBMITTED,
        reward=reward,
        failure=Failure("engine_error", "x") if broken else None,
        n_turns=1,
        n_response_tokens=n,
        submitted_at=0.0,
        finished_at=1.0,
        finish_seq=1,
        segments=(segment,),
    )
