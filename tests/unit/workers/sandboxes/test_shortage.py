"""The control groups that count the kernel's kills of a process's own job."""

from __future__ import annotations

import pytest

from workers.sandboxes.shortage import own_groups

SLURM = """12:cpuset:/slurm/uid_1000/job_7/step_0
5:memory:/slurm/uid_1000/job_7/step_0/task_0
1:name=systemd:/system.slice/slurmd.service
0::/
"""


@pytest.mark.parametrize(
    ("lines", "version_2", "version_1"),
    [
        ("0::/user.slice/session-1.scope\n", "/sys/fs/cgroup/user.slice/session-1.scope", ""),
        (SLURM, "/sys/fs/cgroup/", "/sys/fs/cgroup/memory/slurm/uid_1000/job_7/step_0/task_0"),
        ("4:cpu,memory:/a:b\n", "", "/sys/fs/cgroup/memory/a:b"),
        ("4:memory:/\n", "", ""),
        ("3:memoryless:/x\n", "", ""),
        ("", "", ""),
    ],
)
def test_own_groups_are_found(lines: str, version_2: str, version_1: str) -> None:
    assert own_groups(lines) == (version_2, version_1)
