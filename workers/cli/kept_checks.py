"""Stored results of task checks: each under a digest of all that affects it, so that it never applies to another task,
image, batch, machine or farm.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import farm
import workers
from farm.records.request import SandboxSpec
from farm.settings import settings
from farm.tasks.known_tasks import CHECKS, keep_text, kept_in
from workers.sandboxes.images.content_store import digest
from workers.sandboxes.images.image import image
from workers.sandboxes.launch_plan import start_build
from workers.stages.stage_job import StageJob

_DISTRIBUTION = "rollout-farm"
_OF_NODE = ("build_network", "build_env", "build_files", "image_builder", "sandbox_user", "sandbox_ids", "layer_mb")
"""Settings that affect builds, runs and scores of tasks."""


def check_key(job: StageJob, kind: str, specs: Sequence[SandboxSpec]) -> str:
    """Return the digest of all that affects a check, in addition to the task's files. ImageError, SandboxError. Blocks.

    `kind` is that of its sandboxes; missing images are built.
    """
    batch = [
        job.limits.model_dump(mode="json"),
        job.batch.reward,
        job.batch.network,
        job.batch.verification,
        dict(job.batch.secrets),
    ]
    known = settings()
    node = [os.uname(), sys.version, *(getattr(known, name) for name in _OF_NODE)]
    made = partial(image, start=start_build)
    images = [made(each.image, each.image_values, fallback=each.fallback_image).key for each in specs]
    return digest("check", _code(), batch, kind, node, [each.model_dump(mode="json") for each in specs], images)


@cache
def _code() -> str:
    """Return the digest of the farm's version and of its files, which change in a checkout without the version."""
    folders = [Path(str(package.__file__)).parent for package in (farm, workers)]
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in (".py", ".sh")]
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return digest(version(_DISTRIBUTION), stamps)


def has_kept(archive: str) -> bool:
    """Return whether a check of a task is stored, under any key."""
    return any(kept_in(CHECKS).glob(f"{archive}.*.json"))


def kept_check(archive: str, key: str) -> Mapping[str, Any] | None:
    """Return the fields of a task's stored check; None if there is no readable one."""
    try:
        fields = json.loads((kept_in(CHECKS) / f"{archive}.{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None


def keep_check(archive: str, key: str, fields: Mapping[str, Any]) -> None:
    """Store the fields of a check, as JSON, readable only for the owner of FARM_HOME. Raises NotAllowed, OSError."""
    keep_text(CHECKS, f"{archive}.{key}.json", json.dumps(fields))
