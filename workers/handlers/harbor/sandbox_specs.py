"""The sandboxes of a Harbor task: the policy's, and those in which its steps are verified."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from farm.records.request import SandboxLimits, SandboxSpec
from farm.records.variable_expansion import expanded
from farm.tasks.harbor_config import EnvironmentTable, StepTable
from farm.tasks.harbor_instance import DOCKERFILE, HarborInstance


def agent_sandbox(instance: HarborInstance, archive: Path, secrets: Mapping[str, str] | None) -> SandboxSpec:
    """Return the sandbox of the policy, and of its health checks; variables are not expanded if `secrets` are None.

    Raises InvalidRequest for a variable without a secret.
    """
    table = instance.task.environment
    return _spec(instance, table, _environment(instance, archive), secrets).model_copy(
        update={"user": _user(instance.agent_user(None)), "network_in": instance.network_phases}
    )


def verifier_sandbox(
    instance: HarborInstance, step: StepTable | None, archive: Path, secrets: Mapping[str, str]
) -> SandboxSpec:
    """Return the sandbox in which a step is verified: the policy's own kind if shared, else the verifier's."""
    shared = instance.task.mode(step) == "shared"
    table = instance.task.environment if shared else instance.task.verifier_environment(step)
    image = _environment(instance, archive)
    if (own := instance.verifier_image(step)) is not None:
        image = _images(own.name, archive / own.folder if own.folder else None)
    phases = tuple(phase for phase, mode in instance.network_modes(step).items() if mode == "public")
    updates = {"user": _user(instance.verifier_user(step)), "network_in": phases}
    return _spec(instance, table, image, secrets).model_copy(update=updates)


def _spec(
    instance: HarborInstance, table: EnvironmentTable, images: tuple[str, str], secrets: Mapping[str, str] | None
) -> SandboxSpec:
    env = {**instance.env, **table.env}
    if secrets is not None:
        env = expanded(instance.env, secrets) | expanded(table.env, secrets, whole=True)
    limits = {"memory_mb": table.memory_mb, "disk_mb": table.storage_mb}
    return SandboxSpec(
        image=images[0],
        fallback_image=images[1],
        image_first=True,
        fake_root=True,
        workdir=table.workdir or "",
        env=env,
        limits=SandboxLimits(**{name: value for name, value in limits.items() if value is not None}),
        cpus=None if table.cpus is None else math.ceil(table.cpus * 100) / 100,
    )


def _environment(instance: HarborInstance, archive: Path) -> tuple[str, str]:
    context = archive / DOCKERFILE.rpartition("/")[0] if DOCKERFILE in instance.files else None
    return _images(instance.task.environment.docker_image, context)


def _images(name: str | None, context: Path | None) -> tuple[str, str]:
    """Return the image, and the one to build if it cannot be pulled: a Dockerfile next to a name, if any."""
    built = f"dockerfile:{context}" if context else ""
    return (f"docker://{name}", built) if name else (built, "")


def _user(user: str | int | None) -> str:
    return "" if user is None else str(user)
