"""A trainer that is killed and restarted receives its unacknowledged groups again, and nothing runs twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from farm.records.rollout import Stage, State
from tests.services.farms import embedded, farm_folder
from tests.services.unruly import installed_in

TRAINER = """
import sys, farm
url, batch_id, n_acknowledged = sys.argv[1], sys.argv[2], int(sys.argv[3])
with farm.connect(url) as client:
    for n, group in enumerate(client.stream_groups(batch_id)):
        print(group.group_id, len(group.rollouts), flush=True)
        if n < n_acknowledged:
            client.acknowledge(group)
            print("acknowledged", flush=True)
        else:
            # it trains on it, and dies of that
            sys.stdin.read()
"""


@pytest.fixture(scope="module")
def here() -> Iterator[Embedded]:
    with farm_folder() as folder, embedded(folder, "", False, FARM_RETRY_S="4", **installed_in(folder)) as started:
        yield started


def trained_on(here: Embedded, batch_id: str, n_acknowledged: int) -> list[str]:
    """Return the groups that a trainer received until it was killed, with one of them unacknowledged."""
    command = [sys.executable, "-c", TRAINER, str(here.home), batch_id, str(n_acknowledged)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        try:
            lines = [trainer.stdout.readline() for _ in range(2 * n_acknowledged + 1)]
        finally:
            trainer.kill()
    return [line.split()[0] for line in lines if line.endswith(" 2\n")]


def test_unacknowledged_groups_of_a_killed_trainer_are_delivered_again(here: Embedded) -> None:
    with farm.connect(here.home) as client:
        batch_id = client.submit({"instances": [{"data_source": "noop", "fields": {}}] * 7, "n_samples": 2})
        first = trained_on(here, batch_id, 2)
        second = trained_on(here, batch_id, 3)
        assert len(first) == 3
        assert second[0] == first[2], "the one in its hands comes again, and those before it do not"
        rest = list(client.stream_groups(batch_id, timeout_s=600))
        assert rest[0].group_id == second[3]
        whole = first[:2] + second[:3] + [group.group_id for group in rest]
        assert sorted(whole) == [f"{batch_id}.{index}" for index in range(7)], "each once, none missing"
        everything = list(client.stream_groups(batch_id, cursor=0, timeout_s=600))
        assert [group.group_id for group in everything] == whole, "a cursor of one's own begins where it says"

        at = client.acknowledge(rest[-1])
        assert client.acknowledge(rest[0]) == at, "it never moves back"
        assert list(client.stream_groups(batch_id)) == []
        assert len(list(client.stream(batch_id, consumer="evaluation"))) == 14, (
            "another consumer has a place of its own"
        )
        assert client.rescore(f"{batch_id}.3") == [f"{batch_id}.3.0", f"{batch_id}.3.1"]
        (again,) = client.stream_groups(batch_id, timeout_s=600)
        assert again.group_id == f"{batch_id}.3", "what is scored again comes again"
        assert client.violations(batch_id) == []


def test_retry_runs_only_the_failed_rollout_of_a_group(here: Embedded, tmp_path: Path) -> None:
    breaks_once = {"data_source": "unruly", "fields": {"fault": "agent:raise", "times": 1, "marks": str(tmp_path)}}
    with farm.connect(here.home) as client:
        batch_id = client.submit({"instances": [breaks_once], "n_samples": 8, "max_attempts": 3})
        (group,) = client.stream_groups(batch_id, timeout_s=600)
        assert [(each.state, each.reward) for each in group.rollouts] == [(State.COMPLETED, 1.0)] * 8
        assert sorted(each.attempt for each in group.rollouts) == [1] * 7 + [2]
        timings = [timing for each in group.rollouts for timing in client.timings(each.rollout_id)]
        assert sum(timing.stage is Stage.RUN for timing in timings) == 9, "one more, not eight"
        assert client.violations(batch_id) == []
