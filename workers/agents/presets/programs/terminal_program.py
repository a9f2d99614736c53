"""An agent that types into a shell, like Terminus 2: no tools; the policy answers in JSON and sees the screen.

It needs only Python. The conversation only grows, so a rollout is one training row.
"""

from __future__ import annotations

import json
import math
import os
import pty
import select
import signal
import sys
import time
import urllib.request

from workers.tools.terminal.screen import drawn

SYSTEM = """\
You work on a task by typing into a terminal. Answer with one JSON object and nothing else:
{"analysis": "what the screen shows", "plan": "what you do next",
 "commands": [{"keystrokes": "ls -la\\n", "duration": 1.0}], "task_complete": false}
`keystrokes` are typed as they are: end a command with \\n; C-c and C-d stand for themselves. `duration` is how many
seconds you wait at most for what they print. Say "task_complete": true, with no commands, once the task is done."""
MOST = 10_000
KEYS = {"C-c": "\x03", "C-d": "\x04"}


class TypedShell:
    """A bash on its own terminal; its output is returned once."""

    def __init__(self) -> None:
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.environ.update(PS1="$ ", TERM="dumb", PAGER="cat", GIT_PAGER="cat")
            os.execvp("bash", ["bash", "--norc", "--noprofile"])
        os.set_blocking(self.screen, False)
        self._printed = b""
        self._ended = False

    def type(self, keys: str, limit_s: float) -> None:
        """Type the keys; those that no program reads in time are dropped."""
        data = KEYS.get(keys.strip(), keys).encode("utf-8", "replace")
        until = time.monotonic() + limit_s
        while data and not self._ended and (left := until - time.monotonic()) > 0:
            # Its output must be read meanwhile, or both sides would wait.
            ready, room, _ = select.select([self.screen], [self.screen], [], left)
            if ready:
                self._take()
            if room:
                try:
                    data = data[os.write(self.screen, data[:512]) :]
                except BlockingIOError:
                    select.select([self.screen], [], [], 0.05)
                except OSError:
                    self._ended = True
        if data and not self._ended:
            self._printed += b"\n[the rest was not typed, as nothing reads it]\n"

    def read(self, limit_s: float, quiet_s: float = 0.3) -> str:
        """Return its new output, until it waits at its prompt or the time is over."""
        until = time.monotonic() + limit_s
        while not self._ended and (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([self.screen], [], [], min(left, quiet_s))
            if ready:
                self._take()
            elif self._printed.endswith(b"$ "):
                break
        text, self._printed = self._printed.decode("utf-8", "replace"), b""
        return drawn(text)[0] + ("\n[the shell has ended]" if self._ended else "")

    def _take(self) -> None:
        try:
            self._printed += os.read(self.screen, 65536)
        except OSError:
            self._ended = True

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def ask(messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def parsed(text: str) -> dict:
    """Return the object of an answer. Raises ValueError, worded for the model."""
    begin, end = text.find("{"), text.rfind("}")
    if begin < 0 or end < begin:
        raise ValueError("no JSON object was found")
    try:
        answer = json.loads(text[begin : end + 1])
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    commands = answer.get("commands") or []
    if not isinstance(commands, list) or not all(
        isinstance(each, dict) and isinstance(each.get("keystrokes"), str) for each in commands
    ):
        raise ValueError("each of `commands` must be an object with `keystrokes`, a text")
    for each in commands:
        each["duration"] = each.get("duration") or 1.0
        if not isinstance(each["duration"], (int, float)) or math.isnan(min(each["duration"], 1e9)):
            raise ValueError("`duration` must be a number of seconds")
    return {**answer, "commands": commands}


def shown(text: str) -> str:
    return (
        text
        if len(text) <= MOST
        else f"{text[: MOST // 2]}\n[... {len(text) - MOST} characters ...]\n{text[-MOST // 2 :]}"
    )


def main() -> None:
    terminal = TypedShell()
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{sys.stdin.read()}\n\nThe terminal:\n{terminal.read(5.0)}"},
    ]
    while True:
        reply = ask(messages)
        messages.append({"role": "assistant", "content": reply})
        try:
            answer = parsed(reply)
        except ValueError as error:
            messages.append(
                {"role": "user", "content": f"Your answer could not be read: {error}. Send one JSON object."}
            )
            continue
        screen = ""
        limit_s = float(os.environ["TOOL_S"])
        for each in answer["commands"]:
            terminal.type(each["keystrokes"], limit_s)
            screen += terminal.read(min(each["duration"], limit_s))
        if answer.get("task_complete"):
            break
        messages.append({"role": "user", "content": f"The terminal:\n{shown(screen)}"})
    terminal.close()
    print(answer.get("analysis") or "done")


main()
