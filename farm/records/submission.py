"""Parts of what is kept of a play for its scoring: files with their bytes and modes, the layer, a score given early.

In the store all of it is JSON, with bytes as base64.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from farm.records.scoring.row_rewards import PlayedCall

MAX_TREE_BYTES = 16_000_000
MAX_TREE_FILES = 10_000


class SubmittedFile(BaseModel):
    """A file, a folder or a symbolic link that the policy left, under its path in `Submission.tree`.

    Of a file `data` are its bytes, of a link `target` is its text as it stands; a folder has neither.
    """

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    kind: Literal["file", "folder", "link"] = "file"
    data: bytes = b""
    mode: Annotated[int, Field(ge=0, le=0o7777)] = 0o644
    target: str = ""


class KeptLayer(BaseModel):
    """The writable layer that the policy left: where it is kept, and whether scoring can be repeated with it.

    On the node that played, it lies in the folder of layers as `name` until it is scored. `stored` says that it is an
    artefact of the rollout's `attempt`, too, so that any node can have it, at any time; else it was beyond
    FARM_LAYER_MB. `n_restored` paths were left out of it, as the image's own are to be found there; `restored` is a
    summary of them, in which a `/` at the end stands for all below a folder.
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
    """The part of a rollout that is scored; kept in the store, so that scoring can be repeated without a new play.

    The last five are the farm's: no handler sets them (`workers/plugins/handler.py`).
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
    """Rewards of an environment's steps, as its agent kept them. None if none was played."""
    calls: tuple[PlayedCall, ...] = ()
    """The model calls, for handlers with `scores_calls = True`."""
