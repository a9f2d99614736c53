"""Resource servers of NeMo Gym, https://github.com/NVIDIA-NeMo/Gym, over their HTTP API; the server runs elsewhere.

`kwargs`: `url` of the server, and `row`, an unchanged line of its JSONL: `responses_create_params` with `input` and
`tools`, and the verifier's data. `gymnasium: true` is for servers with `/reset` and `/step`; others have
`/seed_session`, a route for each tool, and `/verify`, which is called once the policy makes no more calls. A cookie
identifies the session. The sandbox shares the node's network, to reach the server.
"""

from __future__ import annotations

import json
import urllib.request
from http.cookiejar import CookieJar
from typing import Any

from workers.environments.environment import Action, AskModel, Begin, Episode, Step

_TIMEOUT_S = 600.0


class NemoGym:
    """One session of a resource server."""

    network = True

    def __init__(self, ask: AskModel) -> None:
        handlers = (urllib.request.HTTPCookieProcessor(CookieJar()), urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)
        self._url = ""
        self._row: dict[str, Any] = {}
        self._gymnasium = False
        self._output: list[dict[str, Any]] = []

    def reset(self, episode: Episode) -> Begin:
        self._url, self._row = str(episode.kwargs["url"]).rstrip("/"), dict(episode.kwargs["row"])
        self._gymnasium = bool(episode.kwargs.get("gymnasium"))
        observed = self._post("reset" if self._gymnasium else "seed_session", self._row).get("observation")
        params = self._row["responses_create_params"]
        prompt = params["input"]
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_message(each) for each in prompt]
        )
        more = [{"role": "user", "content": observed}] if observed else []
        names = ("name", "description", "parameters")
        functions = [
            {name: tool[name] for name in names if tool.get(name) is not None} for tool in params.get("tools", [])
        ]
        tools = [{"type": "function", "function": function} for function in functions]
        return Begin([*episode.messages, *messages, *more], tools)

    def step(self, action: Action) -> Step:
        items = _items(action)
        self._output += items
        if self._gymnasium:
            reply = self._post("step", {**self._row, "response": self._response(items)})
            ends = (bool(reply.get("terminated")), bool(reply.get("truncated")))
            answers = _answers(action, reply.get("observation") or "")
            return Step(answers, _reward(reply), *ends, info=reply.get("info") or {})
        if not action.tool_calls:
            reply = self._post("verify", {**self._row, "response": self._response(self._output)})
            return Step(reward=_reward(reply), terminated=True)
        results = [(call, json.dumps(self._post(call.name, call.arguments))) for call in action.tool_calls]
        kind = "function_call_output"
        self._output += [{"type": kind, "call_id": call.call_id, "output": text} for call, text in results]
        return Step([{"role": "tool", "tool_call_id": call.call_id, "content": text} for call, text in results])

    def close(self) -> float | None:
        return None

    def _response(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        fixed = {"id": "resp_farm", "created_at": 0.0, "model": "policy", "object": "response", "tool_choice": "auto"}
        tools = self._row["responses_create_params"].get("tools", [])
        return {**fixed, "parallel_tool_calls": True, "tools": tools, "output": output}

    def _post(self, route: str, body: Any) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{route}", json.dumps(body).encode(), headers)  # noqa: S310
        with self._opener.open(request, timeout=_TIMEOUT_S) as response:
            reply = json.loads(response.read() or b"{}")
        return reply if isinstance(reply, dict) else {"result": reply}


def _items(action: Action) -> list[dict[str, Any]]:
    content = [{"type": "output_text", "text": action.text, "annotations": []}]
    message = {"type": "message", "id": "msg_farm", "role": "assistant", "status": "completed", "content": content}
    calls = [
        {"type": "function_call", "call_id": each.call_id, "name": each.name, "arguments": json.dumps(each.arguments)}
        for each in action.tool_calls
    ]
    return [*([message] if action.text or not calls else []), *calls]


def _answers(action: Action, observed: str) -> list[dict[str, str]]:
    if not observed and not action.tool_calls:
        return []
    calls = [{"role": "tool", "tool_call_id": each.call_id, "content": observed} for each in action.tool_calls]
    return calls or [{"role": "user", "content": observed}]


def _reward(reply: dict[str, Any]) -> Any:
    if "reward" not in reply:
        raise ValueError("the resource server gave no reward")
    return reply["reward"]


def _message(item: dict[str, Any]) -> dict[str, str]:
    content = item["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return {"role": "system" if item["role"] == "developer" else item["role"], "content": text}
