"""Flower shows how each stage ended: failures as FAILURE with their error, successes with a summary of the result.

It does so even without an event: the worker was killed, or its whole node.
"""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.notifications import redis_client
from farm.records.rollout import Stage, State
from farm.scheduler.broker import TASKS
from tests.services.farms import NOOP, embedded, farm_folder, flower_request, node, until

FAILS = {"data_source": "noop", "fields": {"fail": "eval:bug"}}
ENGINE = {"data_source": "noop", "fields": {"fail": "run:engine_error"}}
PATIENT = {"FARM_LEASE_S": "600", "FARM_NODE_TIMEOUT_S": "600"}
ENDLESS = {"data_source": "noop", "fields": {"seconds": 1000.0}}


@dataclass(frozen=True)
class _FlowerFarm:
    client: farm.Farm
    flower_url: str
    broker_url: str
    store_url: str
    home: Path

    def tasks(self, batch_id: str) -> dict[str, dict[str, Any]]:
        """Return Flower's tasks of a batch: by name, state, result and exception."""
        with urllib.request.urlopen(
            flower_request(f"{self.flower_url}/api/tasks?limit=1000", self.home), timeout=20
        ) as answer:
            known = json.load(answer)
        return {each["name"]: each for each in known.values() if batch_id in (each["args"] or "")}

    def rows(self, batch_id: str) -> list[dict[str, Any]]:
        """Return the rows of Flower's task page that name a batch."""
        query = urllib.parse.urlencode(
            {
                **{"draw": 1, "start": 0, "length": 1000, "search[value]": ""},
                **{"order[0][column]": 0, "order[0][dir]": "asc", "columns[0][data]": "name"},
            }
        )
        request = flower_request(f"{self.flower_url}/tasks/datatable?{query}", self.home)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return [each for each in json.load(answer)["data"] if str(each["args"]).startswith(f"{batch_id}.")]

    def of_attempt(self, rollout_id: str, attempt: int) -> dict[str, dict[str, Any]]:
        return self.tasks(f"(rollout={rollout_id}, attempt={attempt},")

    def ended(self, batch_id: str, n: int) -> dict[str, dict[str, Any]]:
        final = {"SUCCESS", "FAILURE", "RETRY", "REVOKED"}

        def all_ended() -> dict[str, dict[str, Any]]:
            result = self.tasks(batch_id)
            return result if len(result) == n and all(each["state"] in final for each in result.values()) else {}

        return until(all_ended, lambda: f"Flower knows how they ended: {self.tasks(batch_id)}", 60.0)


@pytest.fixture(scope="module")
def here() -> Iterator[_FlowerFarm]:
    with (
        farm_folder() as folder,
        # leases that do not expire on a busy machine: else a cancelled stage would be a lost one
        embedded(folder, flower=True, **PATIENT) as running,
        farm.connect(running.store_url, broker_url=running.broker_url) as client,
    ):
        found = _FlowerFarm(client, running.flower_url, running.broker_url, running.store_url, running.home)

        def listens() -> bool:
            try:
                result = flower_request(f"{running.flower_url}/workers?json=1", running.home)
                with urllib.request.urlopen(result, timeout=60) as answer:
                    found = json.load(answer)["data"]
                    return sum(bool(each["status"]) for each in found) == len(Stage)
            except OSError:
                return False

        until(listens, "Flower lists the workers, by their events alone", 60.0)
        yield found


def test_completed_rollout_shows_its_result(here: _FlowerFarm) -> None:
    batch_id = here.client.submit({"instances": [NOOP]})
    assert here.client.wait(batch_id, 600).n_completed == 1
    tasks = here.ended(batch_id, 3)
    assert {each["state"] for each in tasks.values()} == {"SUCCESS"}
    results = {name: each["result"].strip("'") for name, each in tasks.items()}
    assert results == {
        "rollout.init_sandbox": "advanced to run",
        "rollout.run_agent": "advanced to eval: submitted, 0 turns",
        "rollout.evaluate": "reward 1, submitted",
    }


@pytest.mark.parametrize(
    ("instance", "name", "n_tasks", "says"),
    [
        (FAILS, "rollout.evaluate", 3, "StageFailed('evaluator_error: {}: scoring broke: RuntimeError: the instance"),
        (ENGINE, "rollout.run_agent", 2, "StageFailed('engine_error: {}: the instance asks for engine_error in run"),
    ],
)
def test_broken_stage_is_a_failure_with_its_message(
    here: _FlowerFarm, instance: dict[str, Any], name: str, n_tasks: int, says: str
) -> None:
    batch_id = here.client.submit({"instances": [instance], "max_attempts": 1})
    (rollout,) = here.client.collect(batch_id, timeout_s=600)
    assert rollout.state is State.FAILED
    # the next stage never began: its chain was cut
    tasks = here.ended(batch_id, n_tasks)
    assert tasks[name]["state"] == "FAILURE"
    assert tasks[name]["exception"].startswith(says.format(rollout.rollout_id))
    assert {each["state"] for other, each in tasks.items() if other != name} == {"SUCCESS"}


def test_task_table_has_the_readable_columns_first(here: _FlowerFarm) -> None:
    page = flower_request(f"{here.flower_url}/tasks", here.home)
    with urllib.request.urlopen(page, timeout=60) as answer:
        columns = re.findall(r'<th data-column="(\w+)"', answer.read().decode())
    assert columns == ["name", "args", "state", "result", "runtime", "worker", "received", "uuid"]


def test_task_row_names_the_attempt_and_its_result_in_one_line(here: _FlowerFarm) -> None:
    batch_id = here.client.submit({"instances": [NOOP, FAILS], "max_attempts": 1})
    here.client.wait(batch_id, 600)
    here.ended(f"rollout={batch_id}.0.0,", 3)
    here.ended(f"rollout={batch_id}.1.0,", 3)
    shown = {(each["args"], each["name"]): (each["state"], each["result"]) for each in here.rows(batch_id)}
    good, bad = f"{batch_id}.0.0 attempt 1", f"{batch_id}.1.0 attempt 1"
    assert shown.keys() == {(id, name) for id in (good, bad) for name in TASKS.values()}
    assert shown[good, "rollout.evaluate"] == ("SUCCESS", "reward 1, submitted")
    state, result = shown[bad, "rollout.evaluate"]
    assert state == "FAILURE"
    assert result.startswith(f"evaluator_error: {batch_id}.1.0: scoring broke: RuntimeError: the instance")
    assert not any(sign in result for sign in ("StageFailed", "\n", "\\"))


def test_cancelled_stage_is_revoked(here: _FlowerFarm) -> None:
    batch_id = here.client.submit({"instances": [ENDLESS]})
    until(lambda: here.client.status(batch_id).stages[Stage.RUN][State.ACTIVE] == 1, "it runs", 60.0)
    here.client.cancel(batch_id)
    assert here.ended(batch_id, 2)["rollout.run_agent"]["state"] == "REVOKED"


def test_limit_of_the_policy_is_a_success(here: _FlowerFarm) -> None:
    batch_id = here.client.submit({"instances": [ENDLESS], "limits": {"run_s": 1}})
    (rollout,) = here.client.collect(batch_id, timeout_s=600)
    assert rollout.outcome == "deadline"
    tasks = here.ended(batch_id, 3)
    assert {each["state"] for each in tasks.values()} == {"SUCCESS"}
    assert tasks["rollout.run_agent"]["result"].strip("'") == "advanced to eval: deadline, 0 turns"
    assert tasks["rollout.evaluate"]["result"].strip("'") == f"reward {rollout.reward:g}, deadline"


def test_stage_of_a_killed_node_is_a_retry(here: _FlowerFarm) -> None:
    with farm_folder() as folder, ExitStack() as stack:
        # nothing expires by itself: its successor of the same name reports that it is gone
        with node(folder, "killed", here.store_url, here.broker_url, grace_s=0, **PATIENT) as process:
            until(lambda: "killed" in {each.node for each in here.client.nodes()}, "the node is announced")
            batch_id = here.client.submit({"instances": [ENDLESS] * 30})
            # whatever fails here: later tests need the capacity
            stack.callback(here.client.cancel, batch_id)

            def active_on(name: str) -> list[str]:
                return [
                    each.rollout_id
                    for each in here.client.rollouts(batch_id)
                    if (each.node, each.stage, each.state) == (name, Stage.RUN, State.ACTIVE)
                ]

            def all_started(ids: list[str]) -> bool:
                return {here.of_attempt(each, 1).get("rollout.run_agent", {}).get("state") for each in ids} == {
                    "STARTED"
                }

            taken = until(lambda: len(found := active_on("killed")) == 6 and found, "six do not fit on the other node")
            assert taken
            (left,) = {each.node for each in here.client.nodes()} - {"killed"}
            until(lambda: all_started(taken), "Flower saw them begin")
            process.kill()
            process.wait()
        with node(folder, "killed", here.store_url, here.broker_url, grace_s=0, **PATIENT):

            def all_again() -> bool:
                states = {here.of_attempt(each, 1)["rollout.run_agent"]["state"] for each in taken}
                return states == {"RETRY"}

            until(all_again, "Flower says that they run again")
            for rollout_id in taken:
                before = here.of_attempt(rollout_id, 1)
                assert before["rollout.init_sandbox"]["state"] == "SUCCESS"
                assert before["rollout.run_agent"]["exception"].endswith("(says the store)")
            others = active_on(left)
            until(lambda: all_started(others), "Flower saw them begin, and nothing of them is changed")
            here.client.cancel(batch_id)

            def all_revoked() -> bool:
                tasks = [here.of_attempt(each, 1)["rollout.run_agent"]["state"] for each in others]
                again = [task["state"] for each in taken for task in here.of_attempt(each, 2).values()]
                return {*tasks} == {"REVOKED"} and {*again} <= {"REVOKED", "SUCCESS"}

            until(all_revoked, "Flower says that they were cancelled")


def test_no_result_is_stored_in_the_broker(here: _FlowerFarm) -> None:
    batch_id = here.client.submit({"instances": [NOOP, FAILS], "max_attempts": 1})
    here.client.wait(batch_id, 600)
    redis = redis_client(here.broker_url)
    assert redis is not None
    try:
        assert [key for key in redis.keys("*") if b"celery-task-meta" in key or b"result" in key] == []
    finally:
        redis.close()
