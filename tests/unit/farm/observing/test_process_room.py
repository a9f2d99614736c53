from __future__ import annotations

from pathlib import Path

import pytest

from farm.cli.doctor import process_bounds, process_room
from farm.settings import Settings


@pytest.mark.parametrize(
    ("pid_max", "slots", "ok"),
    [(32_768, {}, False), (131_072, {}, True), (32_768, {"run_slots": 16}, True), (32_768, {"room": 60}, True)],
)
def test_sandboxes_that_may_exhaust_process_ids_are_reported(
    tmp_path: Path, pid_max: int, slots: dict[str, int], ok: bool
) -> None:
    (tmp_path / "loadavg").write_text("0.00 0.01 0.05 1/700 1234\n")
    options = Settings(home=tmp_path, scratch=tmp_path, **slots)  # type: ignore[arg-type]
    found = process_room(options, {"kernel.pid_max": pid_max, "kernel.threads-max": 200_000}, tmp_path)
    assert found.fits == ok
    if not slots and not ok:
        assert found.detail == "76 sandboxes of 512 and 700 others may be 39612, and kernel.pid_max is 32768"
        assert found.remedy == "as root: sysctl -w kernel.pid_max=65536; or have 62 slots (--room)"


@pytest.mark.parametrize(
    ("line", "folder"), [("0::/system.slice/farm.service", ""), ("8:pids:/system.slice/farm.service", "pids/")]
)
def test_parent_control_group_limits_processes_too(tmp_path: Path, line: str, folder: str) -> None:
    kernel, groups = tmp_path / "proc/sys/kernel", tmp_path / "groups"
    kernel.mkdir(parents=True)
    (kernel / "pid_max").write_text("32768\n")
    (kernel / "threads-max").write_text("190000\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n5:memory:/a\n")
    below = groups / f"{folder}system.slice/farm.service"
    below.mkdir(parents=True)
    (below / "pids.max").write_text("max\n")
    (below.parent / "pids.max").write_text("4096\n")
    bounds = process_bounds(tmp_path / "proc", groups)
    bounds.pop("`ulimit -u`", None)
    assert bounds == {"kernel.pid_max": 32768, "kernel.threads-max": 190000, f"{below.parent}/pids.max": 4096}
    assert min(process_bounds().values()) > 300
