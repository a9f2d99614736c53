"""The command line on a running farm, as a person uses it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farm.cli.main import main
from farm.embedded.embedded_farm import Embedded
from farm.errors import ServiceError
from farm.settings import Settings
from tests.doubles import EngineDouble
from tests.services.commands import output_of
from tests.services.farms import farm_folder, flower_request, left_of, until
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

FARM = str(Path(sys.executable).parent / "farm")


class _Shell:
    """Runs `farm` with one home: as a process, or `at_once` in this one, as most of a command's time is its start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
        self.env |= {"FARM_HOME": str(folder / "home"), "FARM_SCRATCH": str(folder / "scratch"), "COLUMNS": "200"}

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run([FARM, *words], env=self.env, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def at_once(self, *words: str, code: int = 0) -> str:
        return output_of(main, *words, code=code, env={name: self.env.get(name) for name in {*os.environ, *self.env}})


@pytest.fixture(scope="module")
def farm() -> Iterator[_Shell]:
    """Run `farm up` for the tests of this module."""
    with farm_folder() as folder:
        shell = _Shell(folder)
        with (folder / "up.log").open("wb") as log:
            up = subprocess.Popen(
                [FARM, "up", "--run", "8"], env=shell.env, stdout=log, stderr=log, start_new_session=True
            )
        try:
            until(lambda: "ready" in (folder / "up.log").read_text() or up.poll() is not None, "the farm is up", 60)
            yield shell
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(600)
        assert up.returncode == 0, (folder / "up.log").read_text()
        assert left_of(folder) == []


def problems(farm: _Shell, *lines: dict[str, Any]) -> str:
    file = farm.folder / "problems.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def batch(farm: _Shell, *lines: dict[str, Any]) -> str:
    """Return the id of a new batch, which is the first output."""
    return farm.at_once("submit", problems(farm, *lines)).split()[0]


NOOP = {"data_source": "noop", "fields": {}, "instance_id": "nothing"}


def test_batch_is_submitted_watched_shown_and_collected(farm: _Shell) -> None:
    batch_id = farm("submit", problems(farm, NOOP, NOOP), "-n", "2").split()[0]
    watched = farm.at_once("watch", batch_id)
    assert "4/4 ended" in watched
    assert "nothing" in watched
    shown = farm.at_once("show", f"{batch_id}.1.0")
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


@pytest.fixture
def engine(farm: _Shell) -> Iterator[str]:
    """A double of an LLM server that this farm uses."""
    with serving(EngineDouble(Script([ANSWER])).app()) as url:
        added = farm.at_once("engines", "add", f"{url}/v1")
        assert "yes (generate)" in added or "no node has probed it yet" in added, "a slow machine takes longer"
        until(lambda: "yes (generate)" in farm.at_once("engines", "list"), "a node has asked it")
        yield url
        farm.at_once("engines", "clear")


ANSWER = ScriptedProblem(
    match="capital", branches=(Branch(name="lima", turns=(ScriptedTurn(content="Lima, I think."),)),)
)
CHAT = {"data_source": "chat", "fields": {"question": "What is the capital of Peru?", "expected": "Lima"}}
FAILING = {"data_source": "noop", "fields": {"fail": "run:final"}}
SLOW = {"data_source": "noop", "fields": {"seconds": 300}}


def test_batch_of_all_outcomes_is_collected_as_jsonl_and_npz(farm: _Shell, engine: str) -> None:
    batch_id = batch(farm, CHAT, FAILING, SLOW, NOOP)
    farm.at_once("cancel", f"{batch_id}.2.0")
    output, arrays = farm.folder / "kinds.jsonl", farm.folder / "kinds.npz"
    output.write_text("the one before")
    assert "4 rollouts written" in farm.at_once("collect", batch_id, "-o", str(output))
    chat, failed, cancelled, noop = map(json.loads, output.read_text().splitlines())
    assert [message["role"] for message in chat["messages"]][-2:] == ["user", "assistant"]
    assert (chat["reward"], chat["trainable"], len(chat["segments"])) == (1.0, True, 1)
    (row,) = chat["segments"]
    assert (row["mismatch"], row["trainable"], sum(row["response_mask"])) == (None, True, chat["n_response_tokens"])
    assert chat["rewards"][0]["value"] == 1.0
    assert {timing["stage"] for timing in chat["timings"]} == {"init", "run", "eval"}
    assert (failed["state"], failed["reward"], failed["failure"]["kind"]) == ("failed", None, "handler_error")
    assert (cancelled["state"], cancelled["outcome"], cancelled["segments"]) == ("cancelled", "cancelled", [])
    assert (noop["reward"], noop["segments"], noop["messages"]) == (1.0, [], [])
    farm.at_once("collect", batch_id, "-o", str(arrays))
    with np.load(arrays) as loaded:
        assert loaded["rollout_ids"].tolist() == [chat["rollout_id"]]
        assert loaded["response_ids"][0].tolist() == row["response_ids"]
    assert not list(farm.folder.glob(".kinds*"))
    line = farm.at_once("ls", "-n", "1").splitlines()[-1].split()
    assert line[:4] == [batch_id, "completed", "4/4", "1"]


def test_collect_of_an_unfinished_batch_times_out_or_is_interrupted(farm: _Shell) -> None:
    batch_id = batch(farm, SLOW)
    output = farm.folder / "never.npz"
    assert "0/1 ended" in farm.at_once("collect", batch_id, "-o", str(output), "--timeout", "0.2", code=1)
    command = [FARM, "collect", batch_id, "-o", str(output)]
    process = subprocess.Popen(command, env=farm.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert f"batch {batch_id}: 0/1 ended" in process.stderr.readline(), "it says what it waits for, also in a log"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors.splitlines()[-1]) == (130, "interrupted")
    assert not list(farm.folder.glob("*never*"))
    farm.at_once("cancel", batch_id)


def test_watch_exit_status_reports_failures(farm: _Shell) -> None:
    mixed, well = batch(farm, NOOP, FAILING), batch(farm, NOOP)
    farm.at_once("watch", mixed)
    output = farm.at_once("watch", mixed, "--exit-status", code=1)
    rows = [line.split() for line in output.splitlines() if line.split()[:1] in (["init"], ["run"], ["eval"])]
    assert rows == [["init", "0", "0", "2", "0"], ["run", "0", "0", "1", "1"], ["eval", "0", "0", "1", "0"]]
    farm.at_once("watch", well, "--exit-status")


def test_up_with_an_invalid_node_option_is_refused(farm: _Shell) -> None:
    """Also next to a running farm, which another start would have found."""
    for words, expected in ((("--runn", "3"), "Did you mean '--run'?"), (("--run", "x"), "'x' is not a valid integer")):
        assert expected in farm("up", *words, code=2)


def test_unreachable_engine_is_added_with_a_warning(farm: _Shell) -> None:
    url = "http://127.0.0.1:9/v1"
    assert f"{url} was added, but it does not answer from here" in farm.at_once("engines", "add", url)
    assert "no engine can be used" in until(lambda: warned(farm, url), "a node has found out", 30)
    farm.at_once("engines", "clear")


def warned(farm: _Shell, url: str) -> str:
    output = farm.at_once("submit", problems(farm, NOOP))
    return output if url in output else ""


def test_watch_reports_failures_and_their_causes(farm: _Shell) -> None:
    broken = NOOP | {"fields": {"fail": "run:final"}, "instance_id": "broken"}
    watched = farm.at_once("watch", batch(farm, broken, broken, NOOP))
    assert "failures: 2 handler_error" in watched
    assert "2 failed" in watched
    assert "the instance asks for a final error in run" in watched


def test_cancel_reports_the_number_of_rollouts(farm: _Shell) -> None:
    batch_id = batch(farm, NOOP | {"fields": {"seconds": 300}}, NOOP | {"fields": {"seconds": 300}})
    assert "1 rollouts cancelled" in farm.at_once("cancel", batch_id, f"{batch_id}.0.0")
    assert "1 rollouts cancelled" in farm.at_once("cancel", batch_id)
    assert "0 rollouts cancelled" in farm.at_once("cancel", batch_id)


def test_errors_are_reported_in_one_line(farm: _Shell) -> None:
    assert "NotFound: there is no batch b0" in farm.at_once("watch", "b0", code=1)
    (farm.folder / "bad.jsonl").write_text('{"data_source": "noop", "fields": {"seconds": "x"}}\n')
    refused = farm.at_once("submit", str(farm.folder / "bad.jsonl"), code=1)
    assert "bad.jsonl:1.fields.seconds: " in refused
    (farm.folder / "bad.jsonl").write_text("{}\nnonsense\n")
    assert "bad.jsonl:2: not JSON" in farm.at_once("submit", str(farm.folder / "bad.jsonl"), code=1)
    assert "ends in .npz or .jsonl" in farm.at_once("collect", "b0", "-o", "x.csv", code=1).replace("must end", "ends")
    assert "Conflict: a farm runs in" in farm("up", code=1)
    assert "99999 is not in the range" in farm.at_once("metrics", "--port", "99999", code=2)
    assert "FarmUnreachable: no farm" in farm.at_once("doctor", "--url", "/etc/passwd", code=1)


def test_up_reports_the_kind_of_sandbox(farm: _Shell) -> None:
    output = (farm.folder / "up.log").read_text()
    assert re.search(r"^sandbox (singularity|namespace)( |$)", output, re.MULTILINE), output


def test_doctor_passes_on_a_running_farm(farm: _Shell) -> None:
    result = farm("doctor")
    for what in ("store", "clock", "redis", "sandbox namespace", "user namespaces", "/dev/fuse", "disk (scratch)"):
        assert what in result


def test_doctor_names_the_remedy(farm: _Shell) -> None:
    env = farm.env | {"FARM_HOME": str(farm.folder / "other"), "FARM_BROKER_URL": "redis://127.0.0.1:1/0"}
    env |= {"FARM_STORE_URL": f"sqlite:///{farm.folder}/other/farm.db"}
    done = subprocess.run([FARM, "doctor"], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "farm migrate" in done.stdout
    assert "FARM_BROKER_URL" in done.stdout


def test_up_serves_the_api_and_the_page(farm: _Shell) -> None:
    url = next(line.split()[1] for line in (farm.folder / "up.log").read_text().splitlines() if line.startswith("page"))
    browser = {"Accept": "text/html"}

    def shown() -> str:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=browser), timeout=30) as answer:
                return str(answer.read().decode())
        except urllib.error.URLError:
            return ""

    assert "API key of the farm" in until(shown, "the page asks for a key")


def test_flower_shows_the_three_tasks_of_a_rollout(farm: _Shell) -> None:
    home = farm.folder / "home"
    url = next(line.split()[1] for line in (farm.folder / "up.log").read_text().splitlines() if "flower" in line)

    def tasks() -> dict[str, Any]:
        try:
            with urllib.request.urlopen(flower_request(f"{url}/api/tasks?limit=1000", home), timeout=60) as answer:
                return json.loads(answer.read())  # type: ignore[no-any-return]
        except OSError:
            return {}

    batch_id = batch(farm, NOOP)
    farm.at_once("watch", batch_id)

    def seen() -> list[dict[str, Any]]:
        mine = [task for task in tasks().values() if f"rollout={batch_id}.0.0" in (task["args"] or "")]
        return mine if len(mine) == 3 and all(task["state"] == "SUCCESS" for task in mine) else []

    result = until(seen, "Flower has seen the rollout")
    assert {task["name"] for task in result} == {"rollout.init_sandbox", "rollout.run_agent", "rollout.evaluate"}
    assert {task["args"].split("stage=")[1].rstrip(")") for task in result} == {"init", "run", "eval"}
    assert all("attempt=1" in task["args"] and f"batch={batch_id}" in task["args"] for task in result)
    for path in ("/", "/api/tasks", "/api/workers"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}{path}", timeout=60)


def test_node_that_fails_to_start_reports_its_error(tmp_path: Path) -> None:
    """Also where a program starts the farm, without the checks of the command line."""
    options = Settings(home=tmp_path / "home", scratch=tmp_path / "scratch")
    with pytest.raises(
        ServiceError, match=r"node.log ends with:(.|\n)*No such option '--runn'. Did you mean '--run'\?"
    ):
        Embedded(options, node_options=["--runn", "3"], flower=False).__enter__()
