"""kill -9 of the API, repeatedly: each submit is one batch, each rollout is run, scored and delivered once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import farm
from farm.cli.main import main
from farm.records.rollout import State
from tests.services.api import RestartableApi, killable_api, shown_key
from tests.services.commands import output_of
from tests.services.farms import embedded, farm_folder, left_of, until
from tests.services.soak import repeats

BRIEF = {"data_source": "noop", "fields": {"seconds": 0.3}}
SLOW = {"data_source": "noop", "fields": {"seconds": 3600.0}}
N_KILLS = repeats(3, 15)
N_TRAINERS = 3


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[RestartableApi]:
    """Yield the API of a farm; when both have ended, nothing is left of them."""
    with shown_key(), embedded(folder) as here, killable_api(here.home, folder / "api.log") as started:
        until(started.listens, "the API listens")
        yield started
    assert left_of(folder) == []


class Trainer:
    """Submits batch after batch without a key of its own, and receives the results of each until it is stopped."""

    def __init__(self, client: farm.Farm) -> None:
        self.client = client
        self.ends = False
        self.given: dict[str, list[str]] = {}
        self.n_seen = 0

    def train(self) -> None:
        while not self.ends:
            batch_id = self.client.submit({"instances": [BRIEF] * 4, "n_samples": 2})
            self.n_seen += 1
            result = self.given.setdefault(batch_id, [])
            for rollout in self.client.stream(batch_id, timeout_s=600):
                result.append(rollout.rollout_id)
                self.n_seen += 1


@pytest.mark.soak
def test_killed_api_loses_and_repeats_no_rollout(api: RestartableApi) -> None:
    chance = random.Random(7)
    with farm.connect(api.url) as client, ThreadPoolExecutor(N_TRAINERS) as pool:
        trainers = [Trainer(client) for _ in range(N_TRAINERS)]
        training = [pool.submit(trainer.train) for trainer in trainers]

        def n_seen() -> int:
            failed = [each.exception() for each in training if each.done()]
            assert not failed, failed
            return sum(trainer.n_seen for trainer in trainers)

        try:
            for _ in range(N_KILLS):
                # after as many of their steps, in the middle of any request
                wanted = n_seen() + chance.randrange(1, 8)
                until(lambda wanted=wanted: n_seen() >= wanted, "they have been given more")  # type: ignore[misc]
                api.kill()
                api.start()
        finally:
            for trainer in trainers:
                trainer.ends = True
        for each in training:
            each.result(120)
        result = {batch_id: ids for trainer in trainers for batch_id, ids in trainer.given.items()}
        assert sorted(client.recent(1000)) == sorted(result), "each submit is one batch"
        for batch_id, ids in result.items():
            rollouts = client.rollouts(batch_id)
            assert sorted(ids) == sorted(rollout.rollout_id for rollout in rollouts), "each was given once"
            assert {(rollout.state, rollout.reward) for rollout in rollouts} == {(State.COMPLETED, 1.0)}
            assert all(len(client.rewards(rollout_id)) == 1 for rollout_id in ids), "each was scored once"
            assert client.violations(batch_id) == []


def test_cli_commands_accept_the_url_of_an_api(api: RestartableApi, tmp_path: Path) -> None:
    batch_id = farm.connect(api.url).submit({"instances": [BRIEF]})
    assert "1/1 ended" in output_of(main, "watch", batch_id, "--url", api.url)
    assert "completed" in output_of(main, "show", f"{batch_id}.0.0", "--url", api.url)
    assert "farm_store_up 1.0" in output_of(main, "metrics", "--url", api.url)
    assert "1 known" in output_of(main, "doctor", "--url", api.url)
    named = {"FARM_STORE_URL": api.url}
    assert "1/1 ended" in output_of(main, "watch", batch_id, env=named)
    assert "farm_store_up 1.0" in output_of(main, "metrics", env=named)
    assert "1 known" in output_of(main, "doctor", env=named)
    for words in (("prune", "--older-than", "1d"), ("backup", str(tmp_path / "backup"))):
        assert "this needs the farm's database URL or its folder" in output_of(main, *words, env=named, code=1)


def test_stream_resumes_after_a_clean_api_shutdown(api: RestartableApi, folder: Path) -> None:
    with farm.connect(api.url) as client, ThreadPoolExecutor(1) as pool:
        batch_id = client.submit({"instances": [SLOW]})
        waiting = pool.submit(lambda: list(client.stream(batch_id)))
        until(lambda: client.status(batch_id).stages["run"]["active"], "it runs")  # type: ignore[index]
        assert api.end() == 0
        assert not waiting.done(), "it waits for the next one"
        api.start()
        client.cancel(batch_id)
        assert [rollout.state for rollout in waiting.result(60)] == [State.CANCELLED]
    assert "Traceback" not in (folder / "api.log").read_text()
