"""A batch in files: one rollout as a line of JSON, and files that appear whole or not at all.

Rule: where a file is to be written is checked before anything is waited for, and what was there before stays until
the new one is complete. A line is strict JSON in ASCII: what no JSON number can say (NaN, infinity) is null.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from farm.errors import InvalidRequest
from farm.records.rollout import Reward, Rollout, Timing
from farm.records.trajectory import ModelCall, Segment

_DRIVE = re.compile(r"^[A-Za-z]:[\\/]")


def rollout_line(
    rollout: Rollout, calls: Sequence[ModelCall], timings: Sequence[Timing], rewards: Sequence[Reward]
) -> bytes:
    """Return one line that holds a rollout as it ended: what was said, its training rows, scores and times."""
    values = _plain(_values(rollout, calls, timings, rewards))
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _values(
    rollout: Rollout, calls: Sequence[ModelCall], timings: Sequence[Timing], rewards: Sequence[Reward]
) -> dict[str, Any]:
    failure = rollout.failure
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "data_source": rollout.data_source,
        "instance_id": rollout.instance_id,
        "state": rollout.state,
        "outcome": rollout.outcome,
        "reward": rollout.reward,
        "trainable": rollout.trainable,
        "failure": None if failure is None else {"kind": failure.kind, "message": failure.message},
        "attempt": rollout.attempt,
        "n_turns": rollout.n_turns,
        "n_response_tokens": rollout.n_response_tokens,
        "versions": [rollout.version_min, rollout.version_max],
        "submitted_at": rollout.submitted_at,
        "finished_at": rollout.finished_at,
        "messages": [message for call in calls for message in (*call.messages, call.response, *call.observations)],
        "rewards": [
            {"value": each.value, "details": each.details, "evaluator": each.evaluator, "created_at": each.created_at}
            for each in rewards
        ],
        "timings": [
            {
                "attempt": each.attempt,
                "stage": each.stage,
                "node": each.node,
                "queued_s": each.queued_s,
                "work_s": each.work_s,
                "result": each.result,
                "failure": None if each.failure is None else each.failure.message,
            }
            for each in timings
        ],
        "segments": [_segment(segment) for segment in rollout.segments],
    }


def _segment(segment: Segment) -> dict[str, Any]:
    row = {name: getattr(segment, name) for name in segment.__slots__}
    return row | {"trainable": segment.trainable}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: arrays as lists, and null for floats that are no numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def check_writable(path: Path) -> None:
    """Raise InvalidRequest, before anything is waited for, unless a file can be written at this place."""
    folder = path.absolute().parent
    problem = ""
    if _DRIVE.match(str(path)):
        problem = "is a path of Windows; here folders are separated by /"
    elif not folder.is_dir():
        problem = f"cannot be written: there is no folder {folder}"
    elif path.is_dir():
        problem = "is a folder: name a file in it"
    else:
        try:
            # permissions say too little: of a full quota, a read-only or a special file system
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            problem = f"cannot be written: no file can be made in {folder} ({error.strerror})"
    if problem:
        raise InvalidRequest(f"{path} {problem}", field="output")


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write, which replaces `path` if the block succeeds; else `path` stays as it was."""
    # where it leads to, if it is a link, and with the rights that an ordinary new file has
    target = path.resolve()
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.chmod(target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~_umask())
        part.replace(target)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            # a full disk does not say what could not be written
            error.filename = str(path)
        raise


def _umask() -> int:
    """Return this process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
