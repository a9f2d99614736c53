"""The rollout side of VeRL-Tool's trainer: the requests of one trajectory of its agent loop to a tool server.

Source: verl_tool/agent_loop/verltool_agent_loop.py. Each action that ends in a stop token is one request of one
trajectory. A failed request is repeated after 1 s, `tool_call_max_retries` times; then the text of its error is the
observation. When the trajectory has ended, `finish` is sent without waiting for its answer.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

import httpx2


@dataclass(frozen=True)
class ToolInteraction:
    """An answer as the loop reads it; `success` is False if there was none and the loop made the observation."""

    text: str
    done: bool
    valid: bool
    success: bool


class VerlToolTrajectory:
    """One trajectory. The key is the password of the client's URL, as its loop sends no header of its own."""

    def __init__(self, client: httpx2.AsyncClient, max_retries: int = 1, **extra_info: Any) -> None:
        self.request_id = uuid.uuid4().hex
        self.n_requests = 0
        self._client = client
        self._max_retries = max_retries
        self._extra_info = extra_info

    async def act(self, action: str) -> ToolInteraction:
        """Send an action, and read its observation as the loop does."""
        answer, success = await self._sent(action, finish=False)
        shown = answer["observations"][0]
        if isinstance(shown, dict):
            assert shown.get("reward") is None or isinstance(shown["reward"], int | float)
            shown = shown["obs"]
        assert isinstance(shown, str)
        return ToolInteraction(shown, bool(int(answer["dones"][0])), bool(int(answer["valids"][0])), success)

    async def close(self) -> None:
        await self._sent("", finish=True)

    async def _sent(self, action: str, finish: bool) -> tuple[dict[str, Any], bool]:
        body: dict[str, Any] = {"trajectory_ids": [self.request_id], "actions": [action], "finish": [finish]}
        body["is_last_step"] = [finish]
        if not finish:
            body["extra_fields"] = [self._extra_info]
        answer: dict[str, Any] = {}
        for _ in range(self._max_retries + 1):
            self.n_requests += 1
            try:
                response = await self._client.post("/get_observation", json=body)
                response.raise_for_status()
                answer = response.json()
                float(answer["processing_time_ms"])
                return answer, True
            except httpx2.HTTPError as error:
                answer = {"observations": [f"Tool call error: {error}."], "dones": [1], "valids": [0]}
            await asyncio.sleep(1)
        return answer, False
