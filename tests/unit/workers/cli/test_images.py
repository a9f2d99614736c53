"""Preparation of sandboxes by `farm images pull`."""

from __future__ import annotations

import ast
import inspect

from farm.records.request import SandboxSpec
from workers.cli.images import _PARTS, _jobs_of
from workers.sandboxes.launch_plan import prepare


def test_all_prepared_parts_of_a_sandbox_are_pulled() -> None:
    nodes = [node for node in ast.walk(ast.parse(inspect.getsource(prepare))) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "spec"}
    assert read - {"network", "network_in"} == {*_PARTS, "agent_programs"}


def test_packages_without_dependencies_are_another_environment() -> None:
    spec = SandboxSpec(packages=("a==1",), without_dependencies=True, workdir="/elsewhere")
    specs = [job.spec for job in _jobs_of([spec, spec, SandboxSpec(packages=("a==1",))])]
    assert [(each.packages, each.without_dependencies) for each in specs] == [(("a==1",), True), (("a==1",), False)]
