"""A whole farm on a real vLLM: new weights during rollouts, tokens that score as sampled, and a cancel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import farm
from farm.records.engine import PauseMode
from farm.records.rollout import Rollout
from farm.records.trajectory import Segment
from tests.services.farms import embedded, farm_folder, until
from tests.vllm.server import RealVllm
from tests.vllm.test_reload import load

N = 4
N_TOKENS = 300


@pytest.fixture(scope="module")
def client(vllm: RealVllm) -> Iterator[farm.Farm]:
    with (
        farm_folder() as folder,
        embedded(folder, FARM_POLICY_URL=f"{vllm.url}/v1") as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as connected,
    ):
        until(lambda: connected.engines()[0].engine.info is not None, "the engine was asked what it can do", 300)
        yield connected
    load(vllm, 0)


def submit(client: farm.Farm, n_tokens: int = N_TOKENS) -> str:
    """Rollouts of one long answer each: random weights seldom end a turn."""
    question = {"data_source": "chat", "fields": {"question": "What do you make of it?"}}
    limits = {"max_tokens": n_tokens, "max_turns": 1, "run_s": 600}
    return client.submit({"instances": [question], "n_samples": N, "limits": limits, "sampling": {"seed": 1}})


def running(vllm: RealVllm) -> int:
    """Return the number of requests that sample now."""
    return int(vllm.metric("vllm:num_requests_running"))


def scored(vllm: RealVllm, row: Segment) -> np.ndarray:
    """Return the log-probabilities of a row's response tokens under the server's current weights."""
    ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    result = {"model": "tiny", "prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 0}
    value = vllm.post("/v1/completions", result)["choices"][0]["logprobs"]["token_logprobs"]
    return np.asarray(value[len(row.prompt_ids) : len(ids)], np.float32)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_tokens_have_the_log_probabilities_of_the_weights_they_name(
    client: farm.Farm, vllm: RealVllm, mode: PauseMode
) -> None:
    load(vllm, 0)
    client.set_version(1)
    batch_id = submit(client)
    until(lambda: running(vllm) == N, "all rollouts sample")
    with client.weight_update(2, mode=mode):
        load(vllm, 1)
    rollouts: list[Rollout] = client.collect(batch_id, timeout_s=300)
    assert all(rollout.trainable for rollout in rollouts)
    rows = [row for rollout in rollouts for row in rollout.segments]
    assert len(rows) == N
    crossed = [row for row in rows if set(row.policy_versions.tolist()) == {1, 2}]
    assert crossed, "no call was in flight when the weights came"
    for row in crossed:
        new = row.policy_versions == 2
        under_new = scored(vllm, row)
        assert np.allclose(under_new[new], row.response_logprobs[new], atol=1e-3)
        assert not np.allclose(under_new[~new], row.response_logprobs[~new], atol=1e-3)


def test_cancelling_a_batch_frees_the_engine(client: farm.Farm, vllm: RealVllm) -> None:
    batch_id = submit(client, 1_500)
    until(lambda: running(vllm) == N, "all rollouts sample")
    client.cancel(batch_id)
    until(lambda: running(vllm) == 0, "the engine samples nothing")
    assert client.status(batch_id).n_cancelled == N
