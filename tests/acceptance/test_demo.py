"""`make demo` as a process: it runs real problems to the end, and however it is ended nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

import farm
from farm.home import KEY_FILE
from tests.doubles import EngineDouble
from tests.services.farms import farm_folder, left_of, processes_of, until
from tests.services.soak import ONLY
from workers.testing.scripted_model import Script
from workers.testing.serving import serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


def demo(folder: Path, *options: str, policy_url: str = "") -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
    env |= {"FARM_HOME": str(folder / "home"), "FARM_SCRATCH": str(folder / "scratch"), "COLUMNS": "160"}
    if policy_url:
        env["FARM_POLICY_URL"] = policy_url
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", *options],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_demo_runs_math_code_and_bug_fixes(folder: Path, apptainer: Path) -> None:
    process = demo(folder, "--math", "1", "--code", "2", "--swe", "1", "-n", "4")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "24 of 24 rollouts scored" in output
    assert "test double" in output
    assert "→ submit" in output
    assert left_of(folder) == []
    with farm.connect(folder / "home") as client:
        (batch_id,) = client.recent()
        rollouts = client.collect(batch_id, timeout_s=0)
    assert {rollout.data_source for rollout in rollouts} == {"math", "code", "swe"}
    assert all(rollout.trainable and rollout.segments for rollout in rollouts)
    groups: dict[str, set[float]] = {}
    for rollout in rollouts:
        assert rollout.reward is not None
        groups.setdefault(rollout.group_id, set()).add(rollout.reward)
    assert sum(len(rewards) > 1 for rewards in groups.values()) >= len(groups) // 2, "rewards in a group should differ"
    for rollout in rollouts:
        (segment,) = rollout.segments
        assert segment.response_mask.sum() == rollout.n_response_tokens


def test_demo_serves_its_page_until_interrupted(folder: Path) -> None:
    process = demo(folder, "--math", "0", "--code", "1", "--swe", "0", "-n", "1", "--no-flower", "--keep")
    assert process.stdout is not None
    words = ""
    while "the page shows it: " not in words and (line := process.stdout.readline()):
        words += line
    assert "the page shows it: " in words, words
    page = words.partition("the page shows it: ")[2].partition(";")[0]
    key = (folder / "home" / KEY_FILE).read_text().strip()
    with httpx2.Client(base_url=page.partition("/web/")[0]) as browser:
        assert browser.post("/web/sign-in", data={"key": key, "then": "/"}).status_code == 303
        shown = browser.get(page)
    assert (shown.status_code, page.rpartition("/")[2] in shown.text) == (200, True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert (process.returncode, "nothing is left running" in output) == (130, True)
    assert left_of(folder) == []


@pytest.fixture
def policy_url() -> Iterator[str]:
    with serving(EngineDouble(Script([]), latency_s=2.0).app()) as url:
        yield f"{url}/v1"


def connected(folder: Path, process: subprocess.Popen[str]) -> list[farm.Farm]:
    """Return the connection to a demo's farm, once there is one."""
    assert process.poll() is None, process.communicate()[0]
    with suppress(farm.FarmError, ValueError):
        return [farm.connect(folder / "home")]
    return []


SLOW, CODE = ("--math", "0", "--code", "4"), ("--math", "0", "--code", "9", "-n", "2")
"""More rollouts than can end before some are seen to have ended; fewer where the engine takes seconds.

They are programs, scored in a sandbox: answers would need a grader, which loads all of reasoning-gym.
"""


@pytest.mark.parametrize(
    ("number", "given", "words"),
    [
        (signal.SIGINT, True, SLOW),
        # handled like SIGINT
        pytest.param(signal.SIGTERM, False, CODE, marks=ONLY),
        (signal.SIGKILL, False, CODE),
    ],
    ids=["interrupted", "terminated", "killed"],
)
def test_interrupted_demo_leaves_nothing(
    folder: Path, number: signal.Signals, given: bool, words: Sequence[str], policy_url: str
) -> None:
    """With either engine: its own double, or a given server."""
    process = demo(folder, *words, "--swe", "0", "--no-flower", policy_url=policy_url if given else "")
    (client,) = until(lambda: connected(folder, process), "there is a farm", 90)
    with client:

        def some_have_ended() -> str:
            assert process.poll() is None, process.communicate()[0]
            return next((each for each in client.recent() if client.status(each).n_finished >= 3), "")

        batch_id = until(some_have_ended, "rollouts of the demo end", 90)
        assert processes_of(folder)
        process.send_signal(number)
        ended = next(each for each in client.rollouts(batch_id) if each.reward is not None)
        engines = {call.engine for call in client.calls(ended.rollout_id)}
    output, _ = process.communicate(timeout=600)
    assert process.returncode == (130 if number is not signal.SIGKILL else -9)
    if given:
        assert f"policy {policy_url} (from FARM_POLICY_URL)" in output
    assert (engines == {policy_url}) == given
    until(lambda: not processes_of(folder), f"all is gone after {number.name}")
    left = [entry for entry in left_of(folder) if number is not signal.SIGKILL or not entry.endswith(".sock")]
    assert left == []
