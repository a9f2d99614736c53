"""The process of one rollout in a sandbox: its requests and replies; and the example of the documentation."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from farm.errors import HandlerError
from farm.records.trajectory import Message
from workers.environments.environment import Action, AskModel, Begin, CalledTool, Environment, Episode, Step
from workers.environments.environment_server import serve
from workers.environments.episode import EpisodeConnection

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "users" / "tasks" / "environments.md"


class Talking:
    """An environment whose messages are answers of another model."""

    def __init__(self, ask: AskModel) -> None:
        self._ask = ask

    def reset(self, episode: Episode) -> Begin:
        return Begin([{"role": "user", "content": self._ask("user", [{"role": "user", "content": "hi"}])}])

    def step(self, action: Action) -> Step:
        replies = "".join(self._ask("user", [{"role": "user", "content": action.text}]) for _ in range(2))
        return Step([{"role": "user", "content": replies}], 1, info={"set": {1}, 2: "two"})  # type: ignore[dict-item]

    def close(self) -> float | None:
        return -0.5


def run_episode(factory: Callable[..., Environment], episode_calls: Callable[[EpisodeConnection], Any]) -> Any:
    """Return the result of a rollout, with its process as a thread."""

    async def main() -> Any:
        here, there = socket.socketpair()
        thread = threading.Thread(target=serve, args=(there, factory), daemon=True)
        thread.start()
        reader, writer = await asyncio.open_unix_connection(sock=here)
        connection = EpisodeConnection("it", reader, writer)
        try:
            return await episode_calls(connection)
        finally:
            connection.drop()
            await asyncio.to_thread(thread.join)
            there.close()

    return asyncio.run(main())


def test_example_of_the_documentation_runs() -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(text, names)
    episode = Episode(kwargs={"words": ["yes", "no"]})

    async def episode_calls(connection: EpisodeConnection) -> list[object]:
        begin = await connection.reset(episode, 10)
        steps = [await connection.step(Action(text), 10) for text in (" yes\n", "what")]
        return [begin, *steps, await connection.finish(10)]

    begin, first, second, last = run_episode(names["Echo"], episode_calls)
    assert begin == Begin([{"role": "user", "content": "yes"}], [])
    assert first == Step([{"role": "user", "content": "no"}], 0.5)
    assert second == Step([], 0.0, terminated=True)
    assert last is None


def test_other_model_is_called_in_between() -> None:
    requests: list[tuple[str, Sequence[Message]]] = []

    async def ask(role: str, messages: Sequence[Message]) -> str:
        requests.append((role, messages))
        return f"<{messages[-1]['content']}>\n\ud800"

    async def episode_calls(connection: EpisodeConnection) -> Any:
        begin = await connection.reset(Episode(), 10, ask)
        return (
            begin,
            await connection.step(Action("well", (CalledTool("1", "look", {}),)), 10, ask),
            await connection.finish(10),
        )

    begin, step, last = run_episode(Talking, episode_calls)
    assert begin.messages[0]["content"] == "<hi>\n\ud800"
    assert step.messages[0]["content"] == "<well>\n\ud800" * 2
    assert (step.reward, step.info, last) == (1.0, {"set": "{1}", "2": "two"}, -0.5)
    assert [role for role, _ in requests] == ["user"] * 3


def test_error_of_the_other_model_is_raised() -> None:
    async def ask(role: str, messages: Sequence[Message]) -> str:
        raise HandlerError("no such role")

    with pytest.raises(HandlerError, match="no such role"):
        run_episode(Talking, lambda connection: connection.reset(Episode(), 10, ask))


@pytest.mark.parametrize(
    ("begin", "complaint"),
    [
        (Begin([]), "returned no message"),
        (Begin([{"role": "user"}]), "messages that are not"),
        (Begin([{"role": "boss", "content": "x"}]), "messages that are not"),
        (Begin([{"role": "user", "content": ["x"]}]), "messages that are not"),
        (Begin([{"role": "user", "content": "x"}], [{"name": "look"}]), "tools that are not functions"),
        (Begin([{"role": "user", "content": "x"}], [{"function": {"name": ""}}]), "tools that are not functions"),
        (Begin([{"role": "user", "content": {1, 2}}]), "TypeError"),
        (None, "AttributeError"),
    ],
)
def test_invalid_begin_is_refused(begin: Any, complaint: str) -> None:
    class Beginner(Talking):
        def reset(self, episode: Episode) -> Begin:
            return begin  # type: ignore[no-any-return]

    with pytest.raises(HandlerError, match=f"environment it: reset.*{complaint}"):
        run_episode(Beginner, lambda connection: connection.reset(Episode(), 10))
