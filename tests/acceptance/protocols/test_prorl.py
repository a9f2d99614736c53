"""A ProRL trainer on a whole farm, whose API is killed in the middle: each request gets the rollout that it began."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.doubles.protocols.prorl_trainer import ProrlTrainer, training_row
from tests.services.api import KEY, RestartableApi, killable_api
from tests.services.farms import embedded, farm_folder, until
from workers.sandboxes.namespace import NamespaceProvider
from workers.testing.serving import serving

N = 6


@pytest.fixture(scope="module")
def double() -> EngineDouble:
    return EngineDouble(wire="prorl", model="scripted", tokens_per_s=60, mean_tokens=100_000)


@pytest.fixture(scope="module")
def here(double: EngineDouble) -> Iterator[tuple[Embedded, RestartableApi, str]]:
    with (
        farm_folder() as folder,
        embedded(folder) as started,
        killable_api(started.home, folder / "api.log", KEY, "--speak", "prorl") as api,
        serving(double.app()) as engine,
    ):
        until(api.listens, "the API listens")
        yield started, api, engine


def trainer(api: RestartableApi, double: EngineDouble, client: str, **sampling: Any) -> ProrlTrainer:
    url = api.url.replace("http://", f"http://farm:{KEY}@")
    return ProrlTrainer(f"{url}/prorl/{client}", custom_tokenizer=str(double.root), **sampling)


def problems(n: int) -> list[dict[str, Any]]:
    fields = {"data_source": "chat", "question": "What is 2 + 2?", "instance_id": "p"}
    return [fields | {"trajectory_id": index} for index in range(n)]


def test_repeated_request_gets_its_rollouts_after_an_api_kill(
    here: tuple[Embedded, RestartableApi, str], double: EngineDouble
) -> None:
    started, api, engine = here
    training = trainer(api, double, "one")

    async def train() -> list[dict[str, Any] | None]:
        await training.use_servers([engine])
        batch = asyncio.create_task(training.rollouts(problems(N)))
        with farm.connect(started.home) as client:
            await asyncio.to_thread(until, lambda: double.n_running == N, "all are sampled")
            api.kill()
            api.start()
            await asyncio.to_thread(until, api.listens, "the API listens again")
            results = await batch
            assert len(client.recent(100)) == N, "no request began a second rollout"
        return results

    results = asyncio.run(train())
    assert training.n_requests > N, "some were asked for again"
    assert [answer for answer in training.answers if answer[0] == "stop"] == [("stop", 200)]
    # the engine never ends by itself: `max_model_len` cuts each answer, as `max_output_tokens` does not apply by token
    errors = [None if result is None else result["error"] for result in results]
    assert errors == ["length: the context window is full"] * N, results
    with farm.connect(started.home) as client:
        for result in filter(None, results):
            ids, mask, logprobs = training_row(result)
            [segment] = client.collect(result["rollout_id"].partition(".")[0])[0].segments
            assert ids == [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
            assert mask == [0] * len(segment.prompt_ids) + segment.response_mask.tolist()
            assert np.allclose(logprobs[len(segment.prompt_ids) :], segment.response_logprobs)


def test_trainer_with_enough_results_cancels_only_its_own_rest(
    here: tuple[Embedded, RestartableApi, str], double: EngineDouble
) -> None:
    started, api, engine = here
    training = trainer(api, double, "two")
    slow = [{"data_source": "noop", "seconds": 3600.0, "trajectory_id": index} for index in range(3)]

    async def train() -> list[dict[str, Any] | None]:
        await training.use_servers([engine])
        return await training.rollouts([*problems(2), *slow], enough=2)

    with farm.connect(started.home) as client:
        foreign = client.submit({"instances": [{"data_source": "noop", "fields": {"seconds": 3600.0}}]})
        results = asyncio.run(train())
        assert sum(result is not None for result in results) == 2
        assert [status for verb, status in training.answers if verb == "cancel"] == [200] * 3
        assert not client.status(foreign).done
        open_ones = [each for each in client.recent(100) if not client.status(each).done]
        assert open_ones == [foreign], "of the trainer's nothing is left"
        client.cancel(foreign)


def test_prompt_rendered_by_trainer_equals_the_sampled_prompt(
    here: tuple[Embedded, RestartableApi, str], double: EngineDouble
) -> None:
    if missing := NamespaceProvider().missing():
        absent(missing)
    started, api, engine = here
    # in this mode its trainer applies the template of `custom_tokenizer` to `messages` with `tools`
    training = trainer(api, double, "three", token_level_generation=False, max_output_tokens=8)
    entry = {"family": "chain_sum", "question": "What is 4 - 1 - 7?", "answer": "-4"}
    metadata = {"source_dataset": "chain_sum", "source_index": 0}
    problem = {"data_source": "math", "trajectory_id": 0, **entry, "metadata": metadata}

    async def train() -> list[dict[str, Any] | None]:
        await training.use_servers([engine])
        return await training.rollouts([problem])

    [result] = asyncio.run(train())
    assert result is not None
    assert [tool["function"]["name"] for tool in result["tools"]] == ["python", "submit"]
    roles = [message["role"] for message in result["messages"]]
    assert roles == ["system", "user", "assistant"]
    assert not any("token_ids" in message for message in result["messages"])
    vocabulary = double.machine.vocabulary
    prompt = vocabulary.encode(vocabulary.render(result["messages"][:2], result["tools"]))
    with farm.connect(started.home) as client:
        [segment] = client.collect(result["rollout_id"].partition(".")[0])[0].segments
    assert prompt.tolist() == segment.prompt_ids.tolist()


def test_api_log_has_no_traceback(here: tuple[Embedded, RestartableApi, str]) -> None:
    started, _, _ = here
    assert "Traceback" not in Path(started.home).parent.joinpath("api.log").read_text()
