"""The requests of SWE-agent, which is on no package index: chat completions as its `default.yaml` makes them.

Based on its sources at 3ea751c (`_history_to_messages` in `sweagent/agent/models.py`, the processors of histories
in `history_processors.py`; MIT licence). It marks the last two messages of users and tools for a cache, so a message
that was a text is sent as a list of one part, and later as a text again.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

from tests.unit.workers.policy.gateway.serving import Playing, served
from workers.testing import answering, calling

TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
    for name, parameters in {
        "bash": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        "submit": {"type": "object", "properties": {}, "required": []},
    }.items()
]
MARK = {"type": "ephemeral"}


def marked(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the last two, like its processor `cache_control`."""
    messages = copy.deepcopy(history)
    last = [each for each in messages if each["role"] in {"user", "tool"}][-2:]
    for each in last:
        part = {"type": "text", "text": each["content"]}
        if each["role"] == "tool":
            each.update(content=[part], cache_control=MARK)
        else:
            each["content"] = [{**part, "cache_control": MARK}]
    return messages


def returned(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy's turn as its client library sends it back, with the index of each call."""
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or ())]
    return {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}


def new_roles(elide: bool = False) -> list[list[str]]:
    """Return the roles of the new messages of each call, in three turns and a last one.

    `elide` omits old observations, like its processor `last_n_observations`.
    """
    commands = ("ls", "cat a.py", "sed -i s/a/b/ a.py")
    turns = [calling(("bash", {"command": each}), content="I go on.") for each in commands]

    async def main() -> list[list[str]]:
        history: list[dict[str, Any]] = [
            {"role": "system", "content": "You are a helpful assistant that can interact with a computer."},
            {"role": "user", "content": "<uploaded_files>\n/testbed\n</uploaded_files>\nImplement the changes."},
        ]
        async with served(Playing(*turns, answering("done"))) as gateway:
            for number in range(4):
                shown = copy.deepcopy(history)
                for old in [each for each in shown if each["role"] == "tool"][: -1 if elide else 0]:
                    old["content"] = "Old environment output: (1 lines omitted)"
                body = {"model": "policy", "temperature": 0.0, "top_p": 1.0, "tools": TOOLS, "messages": marked(shown)}
                answer = await gateway.post("/v1/chat/completions", body)
                assert answer.status_code == 200, answer.text
                message = answer.json()["choices"][0]["message"]
                history.append(returned(message))
                for call in message.get("tool_calls") or ():
                    seen = f"OBSERVATION:\nline {number}"
                    history.append({"role": "tool", "content": seen, "tool_call_id": call["id"]})
        return [[message["role"] for message in call.messages] for call in gateway.records.calls]

    return asyncio.run(main())


def test_conversation_is_one_row_with_any_cache_marks() -> None:
    assert new_roles() == [["system", "user"], ["tool"], ["tool"], ["tool"]]


def test_omitted_old_observations_begin_new_rows() -> None:
    # after the first turn, which is the last unchanged one
    new_rows = [["tool", *["assistant", "tool"] * n] for n in (1, 2)]
    assert new_roles(elide=True) == [["system", "user"], ["tool"], *new_rows]
