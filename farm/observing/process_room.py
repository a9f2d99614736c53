"""The limits for processes and threads on this machine, compared with the needs of its sandboxes.

A sandbox has a pid namespace of its own, and the kernel limits its processes (`n_processes`; also by a control group if
that has the pids controller). Nothing limits all sandboxes together: each process takes an id of the node, so that many
sandboxes at their limits leave none for the node and its workers.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from farm.records.sandbox_spec import SandboxLimits
from farm.settings import Settings


@dataclass(frozen=True, slots=True)
class ProcessRoom:
    """The number of processes needed, `n_needed`, and the most there can be; as text, with the remedy."""

    n_needed: int
    most: int
    detail: str
    remedy: str

    @property
    def fits(self) -> bool:
        return self.n_needed <= self.most


def process_bounds(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """Return the limits for processes and threads of the machine, this user and this control group, by name."""
    bounds = {f"kernel.{name}": int((proc / "sys/kernel" / name).read_text()) for name in ("pid_max", "threads-max")}
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # applies to all sandboxes of an ordinary user; those of root have users of their own
    if os.getuid() and soft != resource.RLIM_INFINITY:
        bounds["`ulimit -u`"] = soft
    for line in (proc / "self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "pids" in controllers.split(","):
            group = (groups if number == "0" else groups / "pids") / path.lstrip("/")
            for folder in (group, *group.parents):
                file = folder / "pids.max"
                if file.exists() and (text := file.read_text().strip()) != "max":
                    bounds[str(file)] = int(text)
    return bounds


def process_room(settings: Settings, bounds: Mapping[str, int], proc: Path = Path("/proc")) -> ProcessRoom:
    """Return whether each of the node's sandboxes could have its maximum number of processes."""
    n_sandboxes = settings.room or settings.init_slots + settings.run_slots + settings.eval_slots
    n_each = SandboxLimits().n_processes
    n_there = int((proc / "loadavg").read_text().split()[3].partition("/")[2])
    name, most = min(bounds.items(), key=lambda each: each[1])
    n_needed = n_sandboxes * n_each + n_there
    detail = f"{n_sandboxes} sandboxes of {n_each} and {n_there} others may be {n_needed}, and {name} is {most}"
    n_fit = max(1, (most - n_there) // n_each)
    raised = (
        f"as root: sysctl -w {name}={1 << n_needed.bit_length()}" if name.startswith("kernel.") else f"raise {name}"
    )
    return ProcessRoom(n_needed, most, detail, f"{raised}; or have {n_fit} slots (--room)")
