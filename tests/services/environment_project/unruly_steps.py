"""An environment that breaks its contract in the way that its instance names, and one that returns given values."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from workers.environments.environment import Action, AskModel, Begin, Episode, PosedProblem, Step

SEEN: list[str] = []
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


class UnrulySteps:
    """Ends after `n` steps of reward 0.25; "win" is worth 1. `fault` breaks something, in `reset` or `step`.

    The text "break:FAULT" breaks it, "later:FAULT" the next request, "shared:" only in a server that is shared.
    """

    memory_mb = 256

    def __init__(self, ask: AskModel) -> None:
        self._ask = ask
        self._options: dict[str, Any] = {}
        self._n = 0

    def reset(self, episode: Episode) -> Begin:
        self._options = dict(episode.kwargs)
        self._fault("reset")
        SEEN.append("reset")
        text = f"{len(SEEN)} {sys.modules.get('left_behind')} {random.random()}"
        return Begin([{"role": "user", "content": text}], [TOOL])

    def step(self, action: Action) -> Step:
        self._n += 1
        self._fault("step")
        self._texts_fault(action.text)
        sys.modules["left_behind"] = sys
        shown = repr([action.text, [[each.name, each.arguments] for each in action.tool_calls]])
        won = action.text == "win"
        over = won or self._n >= self._options.get("n", 3)
        end = {"truncated": True} if self._options.get("truncates") and over else {"terminated": over}
        reward = 1000.0 if action.text == "thousand" else 1.0 if won else 0.25
        return Step([{"role": "user", "content": shown}], reward, **end)

    def close(self) -> float | None:
        self._fault("close")
        self._texts_fault("")
        last: float | None = self._options.get("last")
        return last

    def _texts_fault(self, text: str) -> None:
        how, _, what = text.partition(":")
        if later := self._options.pop("later", ""):
            FAULTS[later](self)
        if how == "break":
            FAULTS[what](self)
        if how == "later":
            self._options["later"] = what
        if how == "shared" and not _may_write():
            os._exit(1)

    def _fault(self, where: str) -> None:
        fault = self._options.get("fault", "")
        if fault.partition(":")[0] == where:
            FAULTS[fault.partition(":")[2]](self)


class Bounded(UnrulySteps):
    """The same with a declared range, and a text that solves it."""

    rewards = (0, 1)

    def reference(self) -> str:
        return "win"


class Lonely(UnrulySteps):
    """The same in a sandbox of its own."""

    shared = False


class Evaluating:
    """Runs the policy's text, as a library that evaluates answers does, and shows the list `seen` that it fills."""

    memory_mb = 256

    def __init__(self, ask: AskModel) -> None:
        self._n = 0

    def reset(self, episode: Episode) -> Begin:
        return Begin([{"role": "user", "content": "Go on."}])

    def step(self, action: Action) -> Step:
        seen: list[str] = []
        exec(action.text, {"seen": seen})
        self._n += 1
        return Step([{"role": "user", "content": repr(seen)}], 0.25, terminated=self._n == 3)

    def reference(self) -> str:
        return ""

    def close(self) -> float | None:
        return None


class Problems:
    """Returns the problem of its `kwargs`, and claims a reward for each answer."""

    def __init__(self, ask: AskModel) -> None:
        pass

    def reset(self, episode: Episode) -> Begin:
        return Begin([{"role": "user", "content": "Answer."}], problem=PosedProblem(**episode.kwargs))

    def step(self, action: Action) -> Step:
        return Step(reward=1.0, terminated=True, answer=action.text or None)

    def close(self) -> float | None:
        return 1.0


class Absent:
    """Imports a missing module."""

    imports = ("a_module_that_is_not_there",)


def _may_write() -> bool:
    try:
        Path("/workspace/written").touch()
    except PermissionError:
        return False
    return True


def _raise(error: BaseException) -> None:
    raise error


def _send(self: Any, data: bytes) -> None:
    # its only connection
    connection = self._ask.__self__._connection
    connection.sendall(data)
    time.sleep(60)


class _Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _kill_all() -> None:
    os.kill(-1, signal.SIGKILL)
    time.sleep(600)


FAULTS: dict[str, Any] = {
    "raise": lambda self: _raise(ValueError("this is wrong")),
    "rude": lambda self: _raise(_Rude()),
    "exit": lambda self: sys.exit(0),
    "_exit": lambda self: os._exit(3),
    "kill": lambda self: os.kill(os.getpid(), signal.SIGKILL),
    "kill_all": lambda self: _kill_all(),
    "segfault": lambda self: ctypes.string_at(0),
    "hang": lambda self: time.sleep(600),
    "memory": lambda self: bytearray(1 << 30),
    "rubbish": lambda self: _send(self, b"what is this?\n"),
    "list": lambda self: _send(self, b"[]\n"),
    "empty": lambda self: _send(self, b"{}\n"),
    "no_step": lambda self: _send(self, b'{"reply": {"reward": 1}}\n'),
    "nan": lambda self: _send(self, _line("NaN")),
    "infinite": lambda self: _send(self, _line("Infinity")),
    "true": lambda self: _send(self, _line("true")),
    "text": lambda self: _send(self, _line('"1"')),
    "huge": lambda self: _send(self, _line("1" + "0" * 400)),
    "bytes": lambda self: _send(self, b"\xff\xfe\n"),
    "half": lambda self: _half(self),
    "web": lambda self: urllib.request.urlopen("http://example.invalid/data.json", timeout=5),
    "thread": lambda self: threading.Thread(target=int).start(),
    "temporary": lambda self: tempfile.mkdtemp(),
    "write": lambda self: Path("/workspace/written").touch(),
    "ask": lambda self: self._ask("user", [{"role": "user", "content": "hello"}]),
}
"""Faults by name; each ends in a failed attempt."""


def _half(self: Any) -> None:
    self._ask.__self__._connection.sendall(b'{"reply": {"rew')
    os._exit(0)


def _line(reward: str) -> bytes:
    step = f'{{"messages": [], "reward": {reward}, "terminated": true, "truncated": false, "info": {{}}}}'
    return f'{{"reply": {step}}}\n'.encode()
