"""The requirements of a Harbor task: those that sandboxes cannot meet are refused at submit, by name."""

from __future__ import annotations

from collections.abc import Iterator

from farm.records.task_needs import TaskNeeds
from farm.tasks.harbor_config import MAIN_SERVICE, EnvironmentTable
from farm.tasks.harbor_instance import COMPOSE, HarborInstance


def needs_of(instance: HarborInstance) -> TaskNeeds:
    """Return everything that a task requires beyond an image, a network and limits."""
    tables = list(_environments(instance))
    return TaskNeeds(
        os=next((table.os for table in tables if table.os != "linux"), "linux"),
        sidecars=tuple(dict.fromkeys(_services(instance, tables))),
        gpus=max(0, *(table.gpus or 0 for table in tables)),
        accelerators=tuple(f"TPU {table.tpu.get('type', '')}".strip() for table in tables if table.tpu),
        privileged=instance.privileged,
        allowed_hosts=tuple(dict.fromkeys(_hosts(instance, tables))),
        host_mounts=instance.mounts,
        other=(*instance.other_needs, *_other(instance)),
    )


def _environments(instance: HarborInstance) -> Iterator[EnvironmentTable]:
    yield instance.task.environment
    for verifier in (instance.task.verifier, *(step.verifier for step in instance.steps)):
        if verifier.environment is not None:
            yield verifier.environment


def _services(instance: HarborInstance, tables: list[EnvironmentTable]) -> Iterator[str]:
    yield from instance.sidecars
    for table in tables:
        yield from (f"MCP server {server.get('name', '')}".strip() for server in table.mcp_servers)
    task, steps = instance.task, instance.steps
    for hook in (*task.verifier.collect, *(each for step in steps for each in step.verifier.collect)):
        if hook.service != MAIN_SERVICE:
            yield hook.service
    for entry in (*task.artifacts, *(each for step in steps for each in step.artifacts)):
        if entry.service not in (None, MAIN_SERVICE):
            yield str(entry.service)


def _hosts(instance: HarborInstance, tables: list[EnvironmentTable]) -> Iterator[str]:
    steps = instance.steps
    phases = (instance.task.agent, instance.task.verifier, *(each for s in steps for each in (s.agent, s.verifier)))
    for table in (*tables, *phases):
        if table.network_mode == "allowlist":
            yield from table.allowed_hosts or ()


def _other(instance: HarborInstance) -> Iterator[str]:
    """Yield requirements that change between steps: a sandbox has one user and one network throughout."""
    task = instance.task
    if any(step.agent.user not in (None, task.agent.user) for step in instance.steps):
        yield "another user in a step than in the task: a sandbox has one for the agent"
    if len({instance.network_modes(step)["run"] for step in instance.steps}) > 1:
        yield "another network in one step than in another: a sandbox has one for the agent"
    for step in instance.steps or (None,):
        own = instance.verifier_image(step)
        if own is not None and not own.name and f"{own.folder}/{COMPOSE}" in instance.files:
            yield f"the services of {own.folder}/{COMPOSE}: a verifier has no services next to it"
            break
