"""A store behind the page, a browser that has signed in, and a batch with hostile text everywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from farm.client.local import LocalFarm
from farm.ids import rollout_id
from farm.notifications import Signals
from farm.records.rollout import Outcome
from farm.records.trajectory import token_ids
from farm.store import trajectories
from farm.store.database import Store
from farm.store.rollouts import rollouts
from farm.web.app import application
from tests.integration.web.hostile_pages import HOSTILE
from tests.services.api import KEY, served
from tests.services.model_calls import model_call


@pytest.fixture
def farm(sqlite_store: Store) -> LocalFarm:
    return LocalFarm(sqlite_store, Signals(""), 1000)


@pytest.fixture
def browser(farm: LocalFarm) -> Iterator[httpx2.Client]:
    """Yield a browser that has signed in."""
    with served(farm, page=application) as url, httpx2.Client(base_url=f"{url}/web") as client:
        answer = client.post("/sign-in", data={"key": KEY, "then": "/"})
        assert answer.status_code == 303
        yield client


@pytest.fixture
def batch_id(farm: LocalFarm) -> str:
    """Return a batch whose first rollout has hostile content in every text of a policy or an engine."""
    instance = {"data_source": "noop", "instance_id": HOSTILE.replace("\x1b", ""), "fields": {}}
    made = farm.submit({"instances": [instance, instance], "n_samples": 2, "metadata": {"note": HOSTILE}})
    id = rollout_id(made, 0, 0)
    call = model_call(
        0,
        messages=[{"role": HOSTILE, "content": HOSTILE}],
        response={
            "role": "assistant",
            "content": [{"type": "text", "text": HOSTILE}, {"type": HOSTILE}],
            "reasoning_content": HOSTILE,
            "tool_calls": [{"function": {"name": HOSTILE, "arguments": json.dumps({HOSTILE: HOSTILE * 100})}}],
        },
        observations=[{"role": "tool", "tool_call_id": HOSTILE, "content": HOSTILE}],
        prompt_ids=token_ids([1, 2]),
        response_ids=token_ids([3, 4]),
        response_logprobs=np.asarray([-0.1, -2.0], np.float32),
        n_prompt_tokens=2,
        n_response_tokens=2,
    )
    log = trajectories.CallLog(id, 1)

    def store_rollout(connection: Any) -> None:
        trajectories.record_call(connection, log.row(call))
        values = {
            "state": "failed",
            "outcome": Outcome.ENGINE_ERROR.value,
            "failure_kind": "engine_error",
            "failure_message": HOSTILE.replace("\x1b", ""),
            "finish_seq": 1,
            "finished_at": 2e9,
            "n_turns": 1,
            "node": "<b>node",
        }
        connection.execute(rollouts.update().where(rollouts.c.rollout_id == id).values(**values))

    farm.store.write(store_rollout)
    return made
