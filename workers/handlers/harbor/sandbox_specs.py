"""The sandboxes of a Harbor task: the one that it is played in, and those that its steps are verified in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from farm.records.request import SandboxLimits, SandboxSpec
from farm.records.variable_expansion import expanded
from farm.tasks.harbor_config import EnvironmentTable, StepTable
from farm.tasks.harbor_instance import HarborInstance


def played_in(instance: HarborInstance, archive: Path, secrets: Mapping[str, str] | None) -> SandboxSpec:
    """Return the sandbox of the policy, and of its health checks; variables stay as written if `secrets` are None.

    Raises InvalidRequest for a variable without a secret.
    """
    table = instance.task.environment
    return _spec(instance, table, _image(table, archive / "environment"), secrets).model_copy(
        update={"user": _user(instance.agent_user(None)), "network_in": instance.network_phases}
    )


def verified_in(
    instance: HarborInstance, step: StepTable | None, archive: Path, secrets: Mapping[str, str]
) -> SandboxSpec:
    """Return the sandbox in which a step is verified: the policy's own kind if shared, else the verifier's."""
    shared = instance.task.mode(step) == "shared"
    table = instance.task.environment if shared else instance.task.verifier_environment(step)
    own = instance.verifier_image(step)
    if own is None:
        image = _image(instance.task.environment, archive / "environment")
    else:
        image = _named(own.name) if own.name else _built(archive / own.folder)
    phases = tuple(phase for phase, mode in instance.network_modes(step).items() if mode == "public")
    updates = {"user": _user(instance.verifier_user(step)), "network_in": phases}
    return _spec(instance, table, image, secrets).model_copy(update=updates)


def _spec(
    instance: HarborInstance, table: EnvironmentTable, image: str, secrets: Mapping[str, str] | None
) -> SandboxSpec:
    env = {**instance.env, **table.env}
    if secrets is not None:
        env = expanded(instance.env, secrets) | expanded(table.env, secrets, whole=True)
    limits = {"memory_mb": table.memory_mb, "disk_mb": table.storage_mb}
    return SandboxSpec(
        image=image,
        image_first=True,
        fake_root=True,
        workdir=table.workdir or "",
        env=env,
        limits=SandboxLimits(**{name: value for name, value in limits.items() if value is not None}),
        cpus=None if table.cpus is None else math.ceil(table.cpus * 100) / 100,
    )


def _image(table: EnvironmentTable, context: Path) -> str:
    return _named(table.docker_image) if table.docker_image else _built(context)


def _built(context: Path) -> str:
    return f"dockerfile:{context}"


def _named(name: str) -> str:
    return f"docker://{name}"


def _user(user: str | int | None) -> str:
    return "" if user is None else str(user)
