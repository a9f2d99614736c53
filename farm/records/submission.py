"""The parts of a rollout kept for scoring: files with bytes and modes, the layer, an early score.

In the store all of it is JSON, with bytes in base64.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from farm.records.scoring.row_rewards import SubmittedCall

MAX_TREE_BYTES = 16_000_000
MAX_TREE_FILES = 10_000


class SubmittedFile(BaseModel):
    """A file, a folder or a symbolic link left by the policy, under its path in `Submission.tree`.

    `data` are the bytes of a file, `target` is the unchanged text of a link; a folder has neither.
    """

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    kind: Literal["file", "folder", "link"] = "file"
    data: bytes = b""
    mode: Annotated[int, Field(ge=0, le=0o7777)] = 0o644
    target: str = ""


class KeptLayer(BaseModel):
    """The writable layer left by the policy: where it is kept, and whether scoring can be repeated with it.

    On the rollout's node it is in the folder of layers as `name` until it is scored. `stored`: it is also an artefact
    of the rollout's `attempt`, available to any node at any time; else it exceeded FARM_LAYER_MB. `n_restored` paths
    were left out because the image has them; `restored` summarizes them, where a final `/` means everything in a
    folder.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    attempt: int
    stored: bool
    restored: tuple[str, ...] = ()
    n_restored: int = 0


class EarlyScore(BaseModel):
    """A score of the running sandbox; see `Handler.scores_running` in `workers/plugins/handler.py`."""

    model_config = ConfigDict(frozen=True)

    value: float
    details: dict[str, Any] = {}
    rewards: dict[str, float] = {}
    evaluator: str


class Submission(BaseModel):
    """The scored part of a rollout; kept in the store, so that scoring can be repeated without another run.

    The farm sets the last five fields, no handler does (`workers/plugins/handler.py`).
    """

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    answer: str | None = None
    files: dict[str, str] = {}
    """Path to text, as the policy left them."""
    tree: dict[str, SubmittedFile] = {}
    """Path to bytes with modes, folders, links; at most MAX_TREE_FILES of MAX_TREE_BYTES in all."""
    layer: KeptLayer | None = None
    steps: list[dict[str, Any]] = []
    """The records of the steps before the last one, in order."""
    early_score: EarlyScore | None = None
    rewards: tuple[float, ...] | None = None
    """Rewards of an environment's steps, recorded by its agent. None without an environment."""
    calls: tuple[SubmittedCall, ...] = ()
    """The model calls, for handlers with `scores_calls = True`."""
