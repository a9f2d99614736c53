"""Requirements that the farm does not meet, each refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from farm.records.request import SandboxSpec
from farm.records.task_needs import TaskNeeds, unsupported

REFUSED: dict[str, dict[str, Any]] = {
    "operating system windows": {"os": "windows"},
    r"sidecar services \(db, redis\)": {"sidecars": ("db", "redis")},
    "2 GPUs": {"gpus": 2},
    r"accelerators \(v5e\)": {"accelerators": ("v5e",)},
    "virtual machine": {"virtual_machine": True},
    "privileges": {"privileged": True},
    r"hosts only \(example.org\)": {"allowed_hosts": ("example.org",)},
    r"folders of the host \(/data\)": {"host_mounts": ("/data",)},
    r"the network \(phases run\)": {"network_in": ("run",)},
    "a healthcheck": {"other": ("a healthcheck",)},
}


@pytest.mark.parametrize("need", REFUSED)
def test_each_unsupported_need_is_refused_by_name(need: str) -> None:
    [reason] = unsupported(TaskNeeds(**REFUSED[need]))
    assert pytest.raises(AssertionError, match=need).matches(AssertionError(reason))


def test_no_needs_are_supported_and_all_reasons_are_listed() -> None:
    assert unsupported(TaskNeeds(), SandboxSpec()) == []
    assert len(unsupported(TaskNeeds(gpus=1, sidecars=("a",)), SandboxSpec(network=True))) == 3


@pytest.mark.parametrize(("rule", "n"), [("refuse", 1), ("allow", 0), ("off", 0)])
def test_network_rule_of_the_batch_decides_about_the_network(rule: Any, n: int) -> None:
    assert len(unsupported(TaskNeeds(), SandboxSpec(network=True), rule)) == n
    assert len(unsupported(TaskNeeds(), SandboxSpec(network_in=("init",)), rule)) == n
