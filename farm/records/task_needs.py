"""Requirements of a task that no sandbox of the farm meets, and the function that refuses them.

Checked at submit, so that no task starts that cannot run as its authors meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from farm.records.request_values import Request
from farm.records.sandbox_spec import SandboxSpec

NetworkRule: TypeAlias = Literal["refuse", "allow", "off"]
"""`BatchRequest.network`."""


class TaskNeeds(Request):
    """A task's requirements beyond a `SandboxSpec`, as its own format states them; the defaults require nothing.

    Lists name the required items, such as the other services of a compose file.
    """

    os: str = "linux"
    sidecars: tuple[str, ...] = ()
    """Services that run next to the sandbox, by name: of a compose file, tool servers, simulated users."""
    gpus: Annotated[int, Field(ge=0)] = 0
    accelerators: tuple[str, ...] = ()
    """Other devices, such as a TPU's type."""
    virtual_machine: bool = False
    """It needs its own kernel or desktop."""
    privileged: bool = False
    """It needs rights over the node, such as a container's `privileged` or added capabilities."""
    allowed_hosts: tuple[str, ...] = ()
    """The only hosts that it may reach: the farm's sandboxes reach everything that the node does, or nothing."""
    network_in: tuple[Literal["init", "run", "eval"], ...] = ()
    """Phases in which it needs the network, if its spec is not known at submit; see `SandboxSpec.network_in`."""
    host_mounts: tuple[str, ...] = ()
    """Folders of the host outside the task's own."""
    other: tuple[str, ...] = ()
    """Anything else, in words that complete the sentence "it asks for ..."."""


def unsupported(needs: TaskNeeds, spec: SandboxSpec | None = None, network: NetworkRule = "refuse") -> Sequence[str]:
    """Return the requirements that the farm cannot meet or the batch does not permit, in words.

    `spec` is the task's sandbox, `network` the rule of its batch. Each reason completes the sentence "it asks for ...".
    """
    return [reason for reason in (*_of_needs(needs), _of_network(needs, spec, network)) if reason]


def _of_needs(needs: TaskNeeds) -> Sequence[str]:
    return [
        f"the operating system {needs.os}: sandboxes are Linux" if needs.os.lower() != "linux" else "",
        f"sidecar services ({_listed(needs.sidecars)}): a sandbox has no services next to it" if needs.sidecars else "",
        f"{needs.gpus} GPUs: a sandbox has none" if needs.gpus else "",
        f"accelerators ({_listed(needs.accelerators)}): a sandbox has none" if needs.accelerators else "",
        "a virtual machine: a sandbox shares its node's kernel" if needs.virtual_machine else "",
        "privileges over its node: a sandbox has none" if needs.privileged else "",
        f"a network to these hosts only ({_listed(needs.allowed_hosts)}): a sandbox has the node's whole network or "
        "none"
        if needs.allowed_hosts
        else "",
        f"folders of the host ({_listed(needs.host_mounts)}): a sandbox sees none" if needs.host_mounts else "",
        *needs.other,
    ]


def _of_network(needs: TaskNeeds, spec: SandboxSpec | None, network: NetworkRule) -> str:
    phases = dict.fromkeys((*needs.network_in, *(spec.network_in if spec else ())))
    if network != "refuse" or not (phases or (spec and spec.network)):
        return ""
    named = "all phases" if spec and spec.network else "phases " + ", ".join(phases)
    return f'the network ({named}): submit with network="allow" to permit it, or network="off" to run it without'


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{name:.60}" for name in names[:5]) + (", ..." if len(names) > 5 else "")
