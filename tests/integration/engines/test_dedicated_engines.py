"""Batches and instances with their own engines, on a whole farm that has another engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.cli.main import main
from farm.client.gathered_rollouts import GatheredRollouts
from farm.client.local import LocalFarm
from farm.embedded.embedded_farm import Embedded
from farm.errors import InvalidRequest
from farm.ids import batch_of
from farm.records.request import Instance
from tests.doubles import EngineDouble
from tests.services.api import KEY as API_KEY
from tests.services.api import served, shown_key
from tests.services.commands import output_of
from tests.services.farms import embedded, farm_folder, paths_below, until
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

KEY = "sk-of-the-trainer-alone"
QUESTION = "How many hops?"
CHAT: dict[str, Any] = {"data_source": "chat", "fields": {"question": QUESTION, "expected": "three"}}
NOWHERE = "http://127.0.0.1:9/v1"


def answers(text: str) -> Script:
    return Script(
        [ScriptedProblem(match=QUESTION, branches=(Branch(name="only", turns=(ScriptedTurn(content=text),)),))]
    )


@dataclass(slots=True)
class Engines:
    """The farm's own engine, whose answers are wrong, and the batches' engines."""

    shared: EngineDouble
    trainer: EngineDouble
    trainer_url: str
    session: EngineDouble
    session_url: str
    text: EngineDouble
    text_url: str


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    shared = EngineDouble(answers("four"), weight_version="0")
    trainer = EngineDouble(answers("three"), weight_version="7", key=KEY)
    session = EngineDouble(answers("three, then"), weight_version="8")
    text = EngineDouble(answers("three, in text"), wire="openai")
    with ExitStack() as stack:
        urls = [f"{stack.enter_context(serving(each.app()))}/v1" for each in (trainer, session, text)]
        yield Engines(shared, trainer, urls[0], session, urls[1], text, urls[2])


@pytest.fixture(scope="module")
def here(engines: Engines) -> Iterator[Embedded]:
    with (
        farm_folder() as folder,
        serving(engines.shared.app()) as url,
        embedded(folder, FARM_POLICY_URL=f"{url}/v1", FARM_ENGINE_AWAY_S="1", FARM_RETRY_S="0.05") as started,
    ):
        yield started


@pytest.fixture(scope="module")
def client(here: Embedded) -> Iterator[farm.Farm]:
    with farm.connect(here.store_url, broker_url=here.broker_url) as connected:
        yield connected


def test_rollout_runs_only_on_its_own_engine(client: farm.Farm, engines: Engines) -> None:
    request = {
        "instances": [CHAT, CHAT | {"engine_url": engines.session_url}, CHAT | {"engine_url": engines.text_url}],
        "n_samples": 2,
        "engine_url": engines.trainer_url,
        "engine_key": KEY,
    }
    of_farm = client.submit({"instances": [CHAT], "n_samples": 2})
    rollouts = client.collect(client.submit(request), timeout_s=600)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 6
    urls = [[call.engine for call in client.calls(rollout.rollout_id)] for rollout in rollouts]
    assert urls == [[engines.trainer_url]] * 2 + [[engines.session_url]] * 2 + [[engines.text_url]] * 2
    # the ids and weights that the endpoints report are recorded, independently of the farm
    assert [[segment.trainable for segment in rollout.segments] for rollout in rollouts] == [[True]] * 4 + [[]] * 2
    assert [rollout.version_min for rollout in rollouts] == [7, 7, 8, 8, None, None]
    assert [rollout.reward for rollout in client.collect(of_farm, timeout_s=600)] == [0.0] * 2
    calls = [call.engine for rollout in client.rollouts(of_farm) for call in client.calls(rollout.rollout_id)]
    assert set(calls).isdisjoint({engines.trainer_url, engines.session_url, engines.text_url})
    assert [state.engine.url for state in client.engines()] == [*dict.fromkeys(calls)]


def test_engine_is_probed_once_for_many_rollouts(client: farm.Farm, engines: Engines) -> None:
    request = {"instances": [CHAT] * 8, "engine_url": engines.session_url}
    client.collect(client.submit(request), timeout_s=600)
    before = engines.session.n_started
    client.collect(client.submit(request), timeout_s=600)
    assert engines.session.n_started == before + 8


def test_engine_with_the_chat_route_gets_no_extra_requests(client: farm.Farm, engines: Engines) -> None:
    before = engines.trainer.n_started
    own = {"engine_url": engines.trainer_url, "engine_key": KEY, "engine_route": "chat"}
    rollouts = client.collect(client.submit({"instances": [CHAT] * 3, **own}), timeout_s=600)
    assert [(rollout.reward, rollout.segments) for rollout in rollouts] == [(1.0, ())] * 3
    assert engines.trainer.n_started == before + 3


def test_unreachable_engine_fails_the_attempts_without_a_reward(client: farm.Farm, engines: Engines) -> None:
    before = engines.shared.n_started
    batch_id = client.submit({"instances": [CHAT, CHAT | {"engine_url": NOWHERE}], "max_attempts": 2})
    fine, broken = client.collect(batch_id, timeout_s=600)
    assert fine.reward == 0.0
    assert (broken.outcome, broken.reward, broken.trainable, broken.attempt) == ("engine_error", None, False, 2)
    assert broken.failure is not None
    assert NOWHERE in broken.failure.message
    assert engines.shared.n_started == before + 1


def test_call_is_retried_on_a_recovered_engine(client: farm.Farm, engines: Engines) -> None:
    engines.session.fail_next("500", 2)
    (rollout,) = client.collect(
        client.submit({"instances": [CHAT], "engine_url": engines.session_url, "max_attempts": 1}), timeout_s=600
    )
    assert (rollout.reward, rollout.attempt) == (1.0, 1)


def test_weight_update_does_not_pause_dedicated_engines(client: farm.Farm, engines: Engines) -> None:
    own = {"instances": [CHAT], "engine_url": engines.session_url, "max_staleness": 0}
    with client.weight_update(100, timeout_s=60):
        (during,) = client.collect(client.submit(own), timeout_s=600)
    (after,) = client.collect(client.submit(own), timeout_s=600)
    assert [(each.reward, each.version_min) for each in (during, after)] == [(1.0, 8)] * 2


def test_single_rollouts_started_together_form_one_batch(client: farm.Farm, engines: Engines) -> None:
    rollouts = GatheredRollouts(client)
    own = {"engine_url": engines.session_url}
    started = [rollouts.start(Instance(**(CHAT | own)), {"max_attempts": 1}) for _ in range(3)]
    results = [each.ended.result(timeout=600) for each in started]
    assert [rollout.reward for rollout in results] == [1.0] * 3
    assert [rollout.rollout_id for rollout in results] == [each.rollout_id for each in started]
    assert len({rollout.batch_id for rollout in results}) == 1
    # unusable ones fail by themselves, and abandoned ones are cancelled
    wrong = rollouts.start(Instance(data_source="chat", fields={}), {})
    fine = rollouts.start(Instance(**CHAT), {})
    slow = rollouts.start(Instance(data_source="noop", fields={"seconds": 300}), {})
    with pytest.raises(InvalidRequest, match="question"):
        wrong.ended.result(timeout=600)
    assert fine.ended.result(timeout=600).reward == 0.0
    until(lambda: slow.rollout_id, "the slow one was submitted")
    rollouts.close()
    assert client.wait(batch_of(slow.rollout_id), 600).n_cancelled == 1
    with pytest.raises(RuntimeError, match="closed"):
        rollouts.start(Instance(**CHAT), {})


def test_dedicated_engine_works_by_file_and_http_and_its_key_is_hidden(
    client: farm.Farm, here: Embedded, engines: Engines, tmp_path: Path
) -> None:
    request = tmp_path / "request.yaml"
    request.write_text(
        f"instances:\n  - {json.dumps(CHAT)}\n"
        f"  - {json.dumps(CHAT | {'engine_url': engines.trainer_url, 'engine_key': KEY})}\n"
        f"engine_url: {engines.session_url}\n"
    )
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps(CHAT) + "\n")
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    own = ("--engine-url", engines.trainer_url, "--engine-key-file", str(key_file))
    assert isinstance(client, LocalFarm)
    env = {"FARM_API_KEY": API_KEY}
    with shown_key(), served(client) as url:
        sent = [
            output_of(main, "submit", *words, "--url", url, env=env)
            for words in (("--request", str(request)), (str(problems), *own))
        ]
        batches = [output.split()[0] for output in sent]
        shown = "".join(sent)
        for batch_id in batches:
            for words in (("watch", batch_id), ("show", f"{batch_id}.0.0"), ("ls", "--json")):
                shown += output_of(main, *words, "--url", url, env=env)
        on_command_line = (str(problems), "--set", "engine_key=abc", "--url", url)
        assert "--engine-key-file" in output_of(main, "submit", *on_command_line, code=1, env=env)
    rollouts = [rollout for batch_id in batches for rollout in client.collect(batch_id, timeout_s=600)]
    assert [rollout.reward for rollout in rollouts] == [1.0] * 3
    engine_urls = [client.calls(rollout.rollout_id)[0].engine for rollout in rollouts]
    assert engine_urls == [engines.session_url, engines.trainer_url, engines.trainer_url]
    shown += repr([(client.status(batch_id), client.rollouts(batch_id)) for batch_id in batches])
    shown += repr([client.calls(rollout.rollout_id) for rollout in rollouts])
    wrong = client.submit({"instances": [CHAT], "engine_url": engines.trainer_url, "engine_key": f"not-{KEY}"})
    (failed,) = client.collect(wrong, timeout_s=600)
    assert (failed.outcome, failed.reward) == ("engine_error", None)
    assert failed.failure is not None
    assert "401" in failed.failure.message
    shown += repr(failed)
    for log in [path for path in paths_below(Path(here.home)) if path.suffix == ".log"]:
        shown += log.read_text(errors="replace")
    assert KEY not in shown
