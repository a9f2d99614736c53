"""Tasks with features of other formats, on a whole farm: layers, services, steps, archives, secrets, named rewards."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.client.farm import Farm
from farm.errors import InvalidRequest
from farm.records.rollout import Outcome, Rollout, State
from farm.settings import settings
from testkit.deadline import LONG_S
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS
from tests.integration.tasks.task_plugin import installed_in, known_here
from tests.services.farms import embedded, farm_folder, left_of, paths_below, until
from tests.services.servers.registry import registry
from workers.sandboxes import absent_images

SECRET = "sk-not-to-be-seen-42"
CHANGES = (
    "echo done > result; chmod 000 result; mkdir -p a/b; echo x > a/b/c; ln -s c a/b/l; "
    "rm -f /etc/nsswitch.conf; rm -rf /etc/alternatives; mkdir /etc/alternatives; echo new > /etc/alternatives/new"
)
LEFT = (
    "test $(cat /workspace/result) = done && test $(stat -c %a /workspace/result) = 0 && test $(cat /workspace/a/b/l) "
    "= x && test ! -e /etc/nsswitch.conf && test $(ls /etc/alternatives) = new && test $PWD = /elsewhere"
)
SERVE = "cd /tmp && echo alive > page && (python3 -m http.server 8123 >/dev/null 2>&1 &) ; sleep 1; echo started"
ASK = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/page').read())\" | grep alive"


@dataclass(frozen=True)
class TaskFarm:
    """A farm, and its folder."""

    folder: Path
    client: Farm
    url: str

    def run(self, data_source: str, fields: dict[str, Any], **more: Any) -> Rollout:
        archive = {"archive": more.pop("archive")} if "archive" in more else {}
        instance = {"data_source": data_source, "fields": fields} | archive
        return self.client.collect(self.client.submit({"instances": [instance]} | more), timeout_s=300)[0]

    def reward(self, rollout: Rollout) -> tuple[float | None, dict[str, Any]]:
        newest = self.client.rewards(rollout.rollout_id)[-1]
        return self.client.rollout(rollout.rollout_id).reward, newest.details

    def rescore(self, rollout: Rollout) -> Rollout:
        assert self.client.rescore(rollout.rollout_id) == [rollout.rollout_id]
        self.client.wait(rollout.batch_id, timeout_s=300)
        return self.client.rollout(rollout.rollout_id)

    def layers(self) -> list[str]:
        return [path.name for path in paths_below(self.folder / "scratch") if path.name.startswith("left-")]


@pytest.fixture(scope="module")
def here() -> Iterator[TaskFarm]:
    with farm_folder() as folder:
        env: dict[str, Any] = installed_in(folder) | {"FARM_WARM_POOL": "0", "FARM_LAYER_MB": "1"}
        with (
            embedded(folder, **env) as up,
            farm.connect(up.store_url, broker_url=up.broker_url) as client,
            known_here(folder),
        ):
            yield TaskFarm(folder, client, up.store_url)
        assert left_of(folder) == []


@pytest.mark.parametrize("kind", PROVIDERS)
def test_files_left_by_a_policy_are_scored_and_rescored_later(here: TaskFarm, apptainer: Path, kind: str) -> None:
    rollout = here.run("left", {"commands": [CHANGES], "check": LEFT}, sandbox=kind)
    assert rollout.reward is not None, rollout.failure
    assert here.reward(rollout) == (1.0, {"output": ""})
    until(lambda: not here.layers(), "the layer is removed from the node")
    again = here.rescore(rollout)
    assert (again.reward, again.attempt, here.reward(again)[1]) == (1.0, 2, {"output": ""})


def test_too_large_layer_is_scored_once_and_its_rescore_is_refused(here: TaskFarm) -> None:
    large = "head -c 3000000 /dev/urandom > large; echo x > result"
    rollout = here.run("left", {"commands": [large], "check": "test $(cat /workspace/result) = x"})
    assert rollout.reward == 1.0
    assert here.client.artefacts(rollout.rollout_id) == []
    until(lambda: not here.layers(), "the layer is removed from the node")
    again = here.rescore(rollout)
    assert again.reward == 1.0, "a score can only be followed by another"
    failed = here.client.timings(rollout.rollout_id)[-1].failure
    assert failed is not None
    assert "FARM_LAYER_MB" in failed.message


@pytest.mark.parametrize("data_source", ["left", "service"])
def test_worker_killed_during_scoring_costs_an_attempt_not_the_reward(here: TaskFarm, data_source: str) -> None:
    mark = here.folder / f"killed-{data_source}"
    fields = {"commands": ["echo x > result"], "check": "test $(cat /workspace/result) = x", "kill": str(mark)}
    rollout = here.run(data_source, fields)
    assert (rollout.reward, rollout.n_lost, mark.exists()) == (1.0, 1, True)


def test_service_is_scored_while_it_runs_and_keeps_its_score(here: TaskFarm) -> None:
    rollout = here.run("service", {"commands": [SERVE], "check": ASK})
    assert rollout.reward == 1.0, here.reward(rollout)
    assert here.run("service", {"commands": ["true"], "check": ASK}).reward == 0.0
    assert here.rescore(rollout).reward == 1.0


def test_steps_continue_in_one_sandbox_and_their_records_are_stored(here: TaskFarm) -> None:
    commands = ["echo one > f", "cat f; echo two >> f", "cat f"]
    rollout = here.run("stepped", {"commands": commands})
    records = [{"answer": "", "n": 1}, {"answer": "one\n", "n": 2}]
    assert here.reward(rollout) == (2.0, {"steps": records, "answer": "one\ntwo\n"})


def test_single_step_agent_is_refused_for_a_task_with_steps(here: TaskFarm) -> None:
    rollout = here.run("stepped", {"commands": ["true", "true"]}, agent="noop", max_attempts=3)
    assert rollout.failure is not None
    assert (rollout.outcome, rollout.n_failures) == (Outcome.HANDLER_ERROR, 0)
    assert "agent noop runs only one" in rollout.failure.message


def test_archive_is_shared_by_digest_and_an_unknown_one_is_refused(here: TaskFarm, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task/instruction.md").write_text("be quick\n")
    digest = here.client.upload_archive(tmp_path / "task")
    assert here.client.upload_archive(tmp_path / "task") == digest
    fields = {"commands": ["cat /task/instruction.md"], "check": "true"}
    instances = [{"data_source": "stepped", "fields": fields, "archive": digest}] * 2
    rollouts = here.client.collect(here.client.submit({"instances": instances, "n_samples": 2}), timeout_s=300)
    assert [here.reward(each)[1]["answer"] for each in rollouts] == ["be quick\n"] * 4
    folders = [path for path in paths_below(here.folder / "scratch") if path.match(f"archives/{digest}/files")]
    # modes of files in images and sandboxes, whatever the umask
    assert [oct(path.stat().st_mode & 0o777) for each in folders for path in (each, each / "instruction.md")] == [
        "0o755",
        "0o644",
    ]
    with pytest.raises(InvalidRequest, match=r"instances\[1\]\.archive: there is no task archive 000"):
        here.client.submit({"instances": [instances[0], {**instances[1], "archive": "0" * 64}]})


def test_batch_option_selects_the_reward_that_counts(here: TaskFarm) -> None:
    fields = {"commands": ["true"], "rewards": {"tests": 0.5, "style": 1.0}}
    rollouts = {
        str(rule): here.run("plain", fields, reward=rule, max_attempts=1)
        for rule in ("tests", {"tests": 2.0, "style": -1}, "speed", "")
    }
    assert [rollout.reward for rollout in rollouts.values()] == [0.5, 0.0, None, None]
    assert here.client.rewards(rollouts["tests"].rollout_id)[-1].rewards == {"tests": 0.5, "style": 1.0}
    messages = [rollouts[rule].failure for rule in ("speed", "")]
    assert all(each is not None and "'style', 'tests'" in each.message for each in messages)
    assert {rollouts["speed"].outcome, rollouts[""].outcome} == {Outcome.EVALUATOR_ERROR}


def test_unsupported_requirements_are_refused_at_submission(here: TaskFarm) -> None:
    needs = {"commands": ["true"], "sidecars": ["db"], "network_in": ["run"]}
    with pytest.raises(
        InvalidRequest, match=r"sidecar services \(db\).*; instances\[0\].fields: it asks for the network"
    ):
        here.run("plain", needs)
    refused = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    off = here.run("plain", {**needs, "sidecars": [], "commands": [f'python3 -c "{refused}"']}, network="off")
    assert off.state is State.COMPLETED


@pytest.mark.parametrize("kind", PROVIDERS)
def test_missing_image_is_refused_at_submission_or_fails_without_retry(
    here: TaskFarm, apptainer: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = f"{here.folder}/nowhere"
    (files := here.folder / f"registry-{kind}").mkdir()
    with registry(files) as (host, _):
        unknown = f"{host}/x@sha256:{'0' * 64}"
        missing = [f"{nowhere}.sif", f"oci-archive:{nowhere}.tar", nowhere, f"dockerfile:{nowhere}", unknown]
        images = ["host", *missing]
        instances = [{"data_source": "imaged", "fields": {"commands": ["true"], "image": image}} for image in images]
        # a process with another home than the nodes' knows nothing
        elsewhere = here.client.collect(here.client.submit({"instances": instances, "sandbox": kind}), timeout_s=300)
        fine, *broken = [(each.outcome, each.n_failures) for each in elsewhere]
        assert fine[0] is Outcome.SUBMITTED
        assert broken == [(Outcome.SANDBOX_ERROR, 0)] * len(missing), "none is tried again"
        for image, rollout in zip(missing, elsewhere[1:], strict=True):
            assert rollout.failure is not None
            assert image.partition(":")[2] in rollout.failure.message
        monkeypatch.setenv("FARM_HOME", str(here.folder / "home"))
        monkeypatch.setattr(absent_images, "REGISTRY_S", LONG_S)
        settings.cache_clear()
        try:
            with farm.connect(here.url) as client, pytest.raises(InvalidRequest) as raised:
                client.submit({"instances": instances, "sandbox": kind})
        finally:
            monkeypatch.undo()
            settings.cache_clear()
    assert [field for field, _ in raised.value.complaints] == [f"instances[{n}].fields.image" for n in range(1, 6)]
    assert all(image in text for image, (_, text) in zip(missing, raised.value.complaints, strict=True))


def test_agent_installed_while_the_farm_runs_is_found_by_workers(here: TaskFarm) -> None:
    assert here.run("plain", {"commands": ["true"]}).reward == 1.0, "the workers have looked for plug-ins by now"
    site = here.folder / "site"
    (site / "late_agent.py").write_text("from tests.integration.tasks.task_plugin import CommandAgent as Late\n")
    described = site / "late_agent-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: late_agent\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[farm.agents]\nlate = late_agent:Late\n")
    rollout = here.run("plain", {"commands": ["true"]}, agent="late", max_attempts=1)
    assert (rollout.outcome, rollout.reward) == (Outcome.SUBMITTED, 1.0), rollout.failure


def test_time_limit_of_a_task_ends_it(here: TaskFarm) -> None:
    rollout = here.run("plain", {"commands": ["sleep 100"], "run_s": 30.0}, limits={"task_time_factor": 0.01})
    assert rollout.outcome is Outcome.DEADLINE


def test_secrets_reach_the_sandbox_and_are_not_stored_or_logged(here: TaskFarm) -> None:
    fields = {"commands": ["test -n $TOKEN && echo token $TOKEN"], "env": {"TOKEN": "${KEY}", "MODE": "${MODE:-on}"}}
    secrets = {"KEY": SECRET}
    shown = here.run("stepped", fields, secrets=secrets)
    assert here.reward(shown)[1]["answer"] == "token [secret]\n"
    failed = here.run("plain", {**fields, "fails": "it broke with ${KEY}"}, secrets=secrets, max_attempts=1)
    assert failed.failure is not None
    assert "it broke with [secret]" in failed.failure.message
    unnamed = here.run("plain", fields, max_attempts=1)
    assert unnamed.failure is not None
    assert "no secret for: KEY" in unnamed.failure.message
    logs = [path for path in paths_below(here.folder) if path.suffix == ".log" and SECRET.encode() in path.read_bytes()]
    assert logs == []
    with sqlite3.connect(here.folder / "home" / "farm.db") as database:
        dump = [line for line in database.iterdump() if SECRET in line]
    assert dump == [], "with the request it is encrypted, as keys of engines are"
