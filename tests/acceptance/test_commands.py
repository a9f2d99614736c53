"""The command line on a running farm, as a person uses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farm.cli import main
from tests.services.commands import said
from tests.services.farms import farm_folder, left_of, until

FARM = str(Path(sys.executable).parent / "farm")


class Shell:
    """Runs `farm` with one home: as a process, or `at_once` in this one, as to start takes most commands' time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
        self.env |= {"FARM_HOME": str(folder / "home"), "FARM_SCRATCH": str(folder / "scratch"), "COLUMNS": "200"}
        self.env |= {"FLOWER_UNAUTHENTICATED_API": "true"}

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run([FARM, *words], env=self.env, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def at_once(self, *words: str, code: int = 0) -> str:
        return said(main, *words, code=code, env={name: self.env.get(name) for name in {*os.environ, *self.env}})


@pytest.fixture(scope="module")
def farm() -> Iterator[Shell]:
    """`farm up` runs while the tests of this module do."""
    with farm_folder() as folder:
        shell = Shell(folder)
        with (folder / "up.log").open("wb") as log:
            up = subprocess.Popen(
                [FARM, "up", "--run", "8"], env=shell.env, stdout=log, stderr=log, start_new_session=True
            )
        try:
            until(lambda: "ready" in (folder / "up.log").read_text() or up.poll() is not None, "the farm is up", 60)
            yield shell
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)
        assert up.returncode == 0, (folder / "up.log").read_text()
        assert left_of(folder) == []


def problems(farm: Shell, *lines: dict[str, Any]) -> str:
    file = farm.folder / "problems.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def batch(farm: Shell, *lines: dict[str, Any]) -> str:
    return farm.at_once("submit", problems(farm, *lines)).strip()


NOOP = {"data_source": "noop", "fields": {}, "instance_id": "nothing"}


def test_submit_watch_show_collect(farm: Shell) -> None:
    batch_id = farm("submit", problems(farm, NOOP, NOOP), "-n", "2").strip()
    watched = farm.at_once("watch", batch_id)
    assert "4/4 ended" in watched
    assert "nothing" in watched
    shown = farm("show", f"{batch_id}.1.0")
    assert "completed" in shown
    assert "outcome submitted" in shown
    assert shown.count("advanced") == 2
    output = farm.folder / "batch.jsonl"
    farm("collect", batch_id, "-o", str(output))
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["rollout_id"], line["reward"]) for line in lines][3] == (f"{batch_id}.1.1", 1.0)
    arrays = farm.folder / "batch.npz"
    farm.at_once("collect", batch_id, "-o", str(arrays))
    with np.load(arrays) as loaded:
        assert loaded["response_ids"].shape == (0, 0), "empty rollouts have no tokens"


def test_watch_says_what_failed_and_why(farm: Shell) -> None:
    broken = NOOP | {"fields": {"fail": "run:final"}, "instance_id": "broken"}
    watched = farm.at_once("watch", batch(farm, broken, broken, NOOP))
    assert "failures: 2 handler_error" in watched
    assert "2 failed" in watched
    assert "the instance asks for a final error in run" in watched


def test_cancel(farm: Shell) -> None:
    batch_id = batch(farm, NOOP | {"fields": {"seconds": 300}}, NOOP | {"fields": {"seconds": 300}})
    assert "1 rollouts cancelled" in farm.at_once("cancel", batch_id, f"{batch_id}.0.0")
    assert "1 rollouts cancelled" in farm.at_once("cancel", batch_id)
    assert "0 rollouts cancelled" in farm.at_once("cancel", batch_id)


def test_mistakes_are_one_line(farm: Shell) -> None:
    assert "NotFound: there is no batch b0" in farm.at_once("watch", "b0", code=1)
    (farm.folder / "bad.jsonl").write_text('{"data_source": "noop", "fields": {"seconds": "x"}}\n')
    refused = farm.at_once("submit", str(farm.folder / "bad.jsonl"), code=1)
    assert "InvalidRequest: instances[0].fields.seconds" in refused
    (farm.folder / "bad.jsonl").write_text("{}\nnonsense\n")
    assert "bad.jsonl:2: no JSON" in farm.at_once("submit", str(farm.folder / "bad.jsonl"), code=1)
    assert "ends in .npz or .jsonl" in farm.at_once("collect", "b0", "-o", "x.csv", code=1).replace("must end", "ends")
    assert "Conflict: a farm runs in" in farm("up", code=1)
    assert "99999 is not in the range" in farm.at_once("metrics", "--port", "99999", code=2)
    assert "FarmUnreachable: no farm" in farm.at_once("doctor", "--url", "/etc/passwd", code=1)


def test_doctor_finds_all_in_order(farm: Shell) -> None:
    found = farm("doctor")
    for what in ("store", "clock", "redis", "sandbox namespace", "user namespaces", "/dev/fuse", "disk (scratch)"):
        assert what in found


def test_doctor_says_how_to_mend(farm: Shell) -> None:
    env = farm.env | {"FARM_HOME": str(farm.folder / "other"), "FARM_BROKER_URL": "redis://127.0.0.1:1/0"}
    env |= {"FARM_STORE_URL": f"sqlite:///{farm.folder}/other/farm.db"}
    done = subprocess.run([FARM, "doctor"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "farm migrate" in done.stdout
    assert "FARM_BROKER_URL" in done.stdout


def test_flower_shows_the_three_tasks_of_a_rollout(farm: Shell) -> None:
    url = next(line.split()[1] for line in (farm.folder / "up.log").read_text().splitlines() if "flower" in line)

    def tasks() -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{url}/api/tasks?limit=1000", timeout=5) as answer:
                return json.loads(answer.read())  # type: ignore[no-any-return]
        except OSError:
            return {}

    until(
        lambda: urllib.request.urlopen(f"{url}/", timeout=5).status == 200 if _listens(url) else False, "Flower is up"
    )
    batch_id = batch(farm, NOOP)
    farm.at_once("watch", batch_id)

    def seen() -> list[dict[str, Any]]:
        mine = [task for task in tasks().values() if f"rollout={batch_id}.0.0" in (task["args"] or "")]
        return mine if len(mine) == 3 and all(task["state"] == "SUCCESS" for task in mine) else []

    found = until(seen, "Flower has seen the rollout")
    assert {task["name"] for task in found} == {"rollout.init_sandbox", "rollout.run_agent", "rollout.evaluate"}
    assert {task["args"].split("stage=")[1].rstrip(")") for task in found} == {"init", "run", "eval"}
    assert all("attempt=1" in task["args"] and f"batch={batch_id}" in task["args"] for task in found)


def _listens(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True
