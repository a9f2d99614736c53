"""Folders of tasks as instances of a request: all are read and checked before the first is uploaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from farm.client.farm import Farm
from farm.errors import InvalidRequest
from farm.records.task_needs import unsupported
from farm.records.variable_expansion import names_in
from farm.settings import settings
from farm.tasks.harbor_folder import TaskFolder, task_folder, task_paths
from farm.tasks.harbor_instance import needs_of
from farm.tasks.known_tasks import evidence_of

_SILENT = "it does not mention the network, so it has one by Harbor's default"


def instances_of(folder: Path, farm: Farm, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Upload the tasks of a folder and return their instances. Raises InvalidRequest before anything is uploaded."""
    complaints: list[tuple[str, str]] = []
    tasks: list[TaskFolder] = []
    with ExitStack() as stack:
        for path in task_paths(folder):
            try:
                task = stack.enter_context(task_folder(path))
            except InvalidRequest as error:
                complaints += error.complaints
                continue
            tasks.append(task)
            complaints += [(str(path), reason) for reason in _refusals(task, request)]
        if complaints:
            raise InvalidRequest.of(complaints)
        instances = []
        for task in tasks:
            archive = farm.upload_archive(task.path)
            instances.append(task.request(archive, evidence_of(settings().home, archive)))
        return instances


def _refusals(task: TaskFolder, request: Mapping[str, Any]) -> list[str]:
    """Return the needs of a task that the farm or its batch does not meet."""
    instance = task.instance
    reasons = [f"it asks for {reason}" for reason in unsupported(needs_of(instance))]
    if request.get("network", "refuse") == "refuse" and instance.network_phases:
        phases = ", ".join(instance.network_phases)
        remark = f"it asks for the network ({phases})" if instance.names_network else _SILENT
        reasons.append(f"{remark}: --set network=allow permits it, --set network=off runs it without")
    secrets = request.get("secrets") or {}
    verifiers = [instance.task.verifier, *(step.verifier for step in instance.steps)]
    tables = [instance.task.environment.env, *(each.env for each in verifiers)]
    tables += [each.environment.env for each in verifiers if each.environment]
    named = names_in(instance.env).union(*(names_in(table, whole=True) for table in tables))
    if missing := sorted(named - {*secrets}):
        reasons.append(f"it uses variables that the request has no `secrets` for: {', '.join(missing)}")
    return reasons
