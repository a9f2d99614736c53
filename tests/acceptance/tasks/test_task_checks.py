"""`farm tasks check` explains why a task is not sound, with the output of its tests, and names the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testkit.scratch_folder import sandbox_config
from tests.integration.tasks.harbor_hacks import write_task
from tests.services.soak import at_length
from tests.services.task_images import task_base
from workers.sandboxes.images.image import set_alias

_REWARD = "> /logs/verifier/reward.json"
TEST = f"""#!/bin/bash
for n in {{1..20}}; do echo "line $n"; done
echo "found: $(cat /app/answer.txt)" >&2
echo '{{"reward": 0.5, "style": 1}}' {_REWARD}
"""


def check(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "farm"), "tasks", "check", str(folder), *options]
    env = os.environ | {"FARM_SANDBOX": "namespace", "COLUMNS": "400"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_unsound_task_is_reported_with_the_output_of_its_tests(place: Path, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", TEST, "echo 41 > /app/answer.txt; echo of the solution; exit 3")
    done = check(folder)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "its solution scores 0.5, not 1; it ended with 3: of the solution" in text
    assert "an untouched sandbox scores 0.5, not 0" in text
    assert "line 20" in text
    assert "line 3 " not in text
    assert "found: 41" in text
    assert "rewards of the solution: reward 0.5, style 1" in text
    result = json.loads(check(folder, "--json").stdout)
    assert (result["sound"], result["solved"], result["rewards"]) == (False, 0.5, {"reward": 0.5, "style": 1.0})
    assert result["test_output"].endswith("found: 41")
    log = Path(result["log"]).read_text()
    assert log.count("line 3\n") == 2
    assert "of the solution\nexit code: 3" in log
    assert "No such file" in log


def test_message_names_the_files_of_the_user(place: Path, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", TEST, "true")
    (folder / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nRUN echo no such tool && exit 7\n")
    result = json.loads(check(folder, "--json").stdout)
    assert not result["sound"]
    assert f"{folder}/environment/Dockerfile:2" in result["problem"]
    assert "archives/" not in result["problem"]


def test_unavailable_image_is_built_from_its_dockerfile_and_reported(
    place: Path, tmp_path: Path, apptainer: Path
) -> None:
    test = '#!/bin/bash\necho "{\\"reward\\": $(cat /app/answer.txt)}" > /logs/verifier/reward.json\n'
    folder = write_task(tmp_path / "task", test, "echo 1 > /app/answer.txt")
    with (folder / "task.toml").open("a") as file:
        file.write('docker_image = "127.0.0.1:1/team/tool:1"\n')
    dockerfile = folder / "environment" / "Dockerfile"
    with dockerfile.open("a") as file:
        file.write("RUN echo 0 > answer.txt\n")
    reason = "docker://127.0.0.1:1/team/tool:1 could not be pulled ("
    done = check(folder, "--json")
    result = json.loads(done.stdout)
    assert (result["sound"], result["solved"], result["untouched"]) == (True, 1.0, 0.0)
    assert result["image"].startswith(reason)
    assert result["image"].endswith("): its Dockerfile was built instead")
    assert reason in done.stderr
    dockerfile.unlink()
    result = json.loads(check(folder, "--json").stdout)
    assert not result["sound"]
    assert "farm images alias 127.0.0.1:1/team/tool:1 IMAGE" in result["problem"]


def test_check_of_an_unchanged_task_is_shown_again(place: Path, tmp_path: Path) -> None:
    test = """#!/bin/bash
echo played >> /logs/played
echo "{\\"reward\\": $(cat /app/answer.txt || echo 0), \\"style\\": 0.5}" > /logs/verifier/reward.json
"""
    folder = write_task(tmp_path / "task", test, "echo 1 > /app/answer.txt")
    base = place / "other-base"
    base.mkdir()
    task_base(base)
    set_alias(sandbox_config(), "base:1", str(base))
    (folder / "environment/Dockerfile").write_text("FROM base:1\nWORKDIR /app\n")
    first = json.loads(check(folder, "--json", "--reward", "reward").stdout)
    assert (first["sound"], first["known"], first["rewards"]) == (True, False, {"reward": 1.0, "style": 0.5})
    began = time.monotonic()
    again = json.loads(check(folder, "--json", "--reward", "reward").stdout)
    took_s = time.monotonic() - began
    assert again == {**first, "known": True}
    assert took_s < 20.0
    shown = " ".join(check(folder, "--reward", "reward").stdout.split())
    assert "sound checked" in shown
    assert "ago: --again repeats the check" in shown

    def is_known(*options: str) -> bool:
        return bool(json.loads(check(folder, "--json", *options).stdout)["known"])

    assert not is_known("--reward", "reward", "--again")
    # other ways to run it
    assert not is_known("--reward", "style")
    # another base, under the same name
    (base / "etc/mark").write_text("another\n")
    assert not is_known("--reward", "reward")
    assert is_known("--reward", "reward")
    (folder / "tests/helper.sh").write_text("changed\n")
    assert not is_known("--reward", "reward")


def test_failed_check_is_repeated(place: Path, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", TEST, "true")
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text("FROM debian:bookworm-slim\nRUN exit 7\n")
    result = json.loads(check(folder, "--json").stdout)
    assert (result["problem"] != "", result["checked_at"], result["known"]) == (True, "", False)
    assert not json.loads(check(folder, "--json").stdout)["known"]


_TERMINAL_BENCH = {
    "task.yaml": "instruction: Write the answer.\nparser_name: pytest\nmax_agent_timeout_sec: 60\n",
    "Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "docker-compose.yaml": "services:\n  client:\n    build: {dockerfile: Dockerfile}\n",
    "solution.sh": "echo 42 > /app/answer.txt\n",
    "run-tests.sh": "set -e\ngrep -qx 42 /app/answer.txt\necho '== short test summary info =='\necho 'PASSED test_x'\n",
    "tests/test_outputs.py": "def test_x(): pass\n",
}
SILENT = {
    "it stops at the first fault": "set -e\ngrep -qx 42 /app/answer.txt\necho 1 > /logs/verifier/reward.txt\n",
    "an empty reward": 'grep -c 42 /app/answer.txt > "/logs/verifier/reward.txt"\n',
    "no number": "{ cat /app/answer.txt || echo none; } | sed s/42/1/ > /logs/verifier/reward.txt\n",
    "it never ends": "until [ -e /app/answer.txt ]; do sleep 1; done\necho 1 > /logs/verifier/reward.txt\n",
}
"""Tests that reward only the solution, with each way to give no reward."""
OLD = "a task of terminal-bench 1"
QUICK = "[verifier]\ntimeout_sec = 6.0\n[agent]\ntimeout_sec = 60.0\n"


@pytest.mark.soak
@pytest.mark.parametrize("name", at_length(["it stops at the first fault", "it never ends", OLD], [*SILENT, OLD]))
def test_missing_reward_is_zero_if_the_solution_has_one(place: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "task"
    if name in SILENT:
        write_task(folder, "#!/bin/bash\n" + SILENT[name], "echo 42 > /app/answer.txt", QUICK)
    else:
        for file, text in _TERMINAL_BENCH.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
    result = json.loads(check(folder, "--json", "--network", "allow").stdout)
    assert (result["problem"], result["solved"], result["untouched"]) == ("", 1.0, 0.0)


def test_missing_reward_is_an_error_if_the_solution_has_none(place: Path, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", "#!/bin/bash\nexit 2\n", "echo 42 > /app/answer.txt; exit 1")
    result = json.loads(check(folder, "--json").stdout)
    assert (result["sound"], result["untouched"]) == (False, None)
    assert "the tests wrote neither /logs/verifier/reward.json nor reward.txt" in result["problem"]
