"""A client of another system's protocol, and a scripted rollout in the store that looks like an agent's."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2
import numpy as np

from farm.client.local import LocalFarm
from farm.records.rollout import Stage
from farm.records.trajectory import ModelCall, token_ids
from farm.store import trajectories
from farm.store.database import Store
from tests.contract.store.test_store import advance, announce, claimed, finish, place
from tests.services.api import KEY
from tests.services.farms import until


class WireClient:
    """A client of a protocol, with threads for late answers. `name` is for the ids that it chooses."""

    def __init__(self, url: str, pool: ThreadPoolExecutor, name: str = "") -> None:
        self.name = name
        self._http = httpx2.Client(base_url=url, headers={"x-api-key": KEY}, timeout=60.0)
        self._pool = pool

    def ask(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        return self._http.request(method, path) if body is None else self._http.request(method, path, json=body)

    def post(self, path: str, body: Any = None) -> httpx2.Response:
        return self.ask("POST", path, body)

    def get(self, path: str) -> httpx2.Response:
        return self.ask("GET", path)

    def reply(self, path: str, body: Any = None) -> tuple[int, Any]:
        answer = self.post(path, body)
        return answer.status_code, answer.json()

    def give_up(self, path: str, body: Any, after_s: float = 1.0) -> None:
        """Send a request, and close the connection before the answer."""
        with suppress(httpx2.TimeoutException):
            answer = self._http.post(path, json=body, timeout=after_s)
            raise AssertionError(f"answered within {after_s} s: {answer.text}")

    def later(self, path: str, body: Any) -> Future[httpx2.Response]:
        return self._pool.submit(self.post, path, body)


def submitted(service: LocalFarm, n: int = 1) -> list[str]:
    """Return the ids of all batches, newest first, once there are n."""
    until(lambda: len(service.recent()) >= n, f"{n} batches are there")
    return service.recent()


BASH: dict[str, Any] = {
    "type": "function",
    "function": {"name": "bash", "description": "Run a command.", "parameters": {"type": "object", "properties": {}}},
}


def model_call(index: int, prompt: list[int], sampled: list[int], **values: Any) -> ModelCall:
    return ModelCall(
        index=index,
        messages=values.get("messages", []),
        response=values["response"],
        observations=values.get("observations", []),
        finish_reason="stop",
        engine="e",
        started_at=1.0,
        latency_s=0.5,
        n_prompt_tokens=len(prompt),
        n_response_tokens=len(sampled),
        prompt_ids=token_ids(prompt),
        response_ids=token_ids(sampled),
        response_logprobs=np.full(len(sampled), -0.5, np.float32),
        tools=values.get("tools"),
    )


def run_two_turns(store: Store, batch_id: str, sample: int = 0, reward: float = 1.0) -> None:
    """Write a rollout whose agent has the tool `BASH`, and calls it once."""
    rollout_id = f"{batch_id}.0.{sample}"
    place(store, batch_id)
    announce(store)
    advance(store, claimed(store, rollout_id, Stage.INIT))
    held = claimed(store, rollout_id, Stage.RUN)
    function = {"name": "bash", "arguments": "{}"}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    calls = [{"id": "1", "type": "function", "function": function}]
    turns = [
        model_call(
            0,
            [1, 2, 3],
            [4, 5],
            messages=messages,
            response={"role": "assistant", "content": None, "tool_calls": calls},
            tools=[BASH],
        ),
        model_call(
            1, [1, 2, 3, 4, 5, 6, 7], [8], response={"role": "assistant", "content": "done"}, tools=[dict(BASH)]
        ),
    ]
    turns[0].observations = [{"role": "tool", "tool_call_id": "1", "content": "out"}]
    log = trajectories.CallLog(rollout_id, 1)
    for turn in turns:
        row = log.row(turn)
        store.write(lambda connection, row=row: trajectories.record_call(connection, row))  # type: ignore[misc]
    advance(store, held, policy_outcome="answered", submission={"files": {"model.patch": "diff"}})
    finish(store, claimed(store, rollout_id, Stage.EVAL), reward)
