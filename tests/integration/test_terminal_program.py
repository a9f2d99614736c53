"""The bare shell's program: it continues after any answer of the policy, and input arrives completely."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from workers.agents.presets.preset_parts import STATE, program, screen
from workers.testing.serving import serving

DONE = json.dumps({"commands": [], "task_complete": True, "analysis": "fixed"})


def shown_after(*replies: str) -> list[str]:
    """Return the input that the program sends a policy with these answers."""
    turns, shown = iter([*replies, DONE]), []

    async def answer(request: Request) -> JSONResponse:
        shown.append((await request.json())["messages"][-1]["content"])
        return JSONResponse({"choices": [{"message": {"content": next(turns)}}]})

    with (
        TemporaryDirectory() as folder,
        serving(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])) as url,
    ):
        more = {"MODEL": "m", "OPENAI_API_KEY": "k", "OPENAI_BASE_URL": f"{url}/v1", "TOOL_S": "60", "MAX_TURNS": "9"}
        for path, text in {**program("terminal_program"), **screen()}.items():
            file = Path(folder, Path(path).relative_to(STATE))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        # with only the modules that are sent along
        command = [sys.executable, "-S", f"{folder}/terminal_program.py"]
        ended = subprocess.run(
            command, input=b"a task", capture_output=True, timeout=300, env={**os.environ, **more}, cwd=folder
        )
    assert (ended.returncode, ended.stdout) == (0, b"fixed\n"), ended.stderr
    return shown


def typing(keys: Any, duration: Any = 30) -> str:
    return json.dumps({"commands": [{"keystrokes": keys, "duration": duration}]})


@pytest.mark.parametrize(
    "reply",
    [
        *("", "{", "[]", "nothing", '{"commands": 5}', '{"commands": "ls"}', '{"commands": {"keystrokes": "ls"}}'),
        *(typing(5), typing("ls", "abc"), typing("ls", [1]), typing("ls", float("nan"))),
        '{"commands": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_invalid_answer_is_reported_to_the_policy(reply: str) -> None:
    assert "Your answer could not be read: " in shown_after(reply)[-1]


@pytest.mark.parametrize("reply", ['{"commands": null}', "{}", typing("true\n", 10**400), typing("true\n", -1)])
def test_incomplete_answer_is_accepted(reply: str) -> None:
    assert shown_after(reply)[-1].startswith("The terminal:")


def test_long_file_is_typed_completely(tmp_path: Path) -> None:
    lines = [f"line {n} of a long file" for n in range(4000)]
    keys = "\n".join([f"cat >{tmp_path}/typed <<'E'", *lines, "E", "wc -l <typed", ""]).replace(
        "<typed", f"<{tmp_path}/typed"
    )
    assert "4000" in shown_after(typing(keys, 60))[-1]
    assert (tmp_path / "typed").read_text().splitlines() == lines


def test_ended_shell_is_reported() -> None:
    assert all("[the shell has ended]" in each for each in shown_after(typing("exit\n"), typing("ls\n"))[1:])


def test_progress_bar_is_reduced_to_its_last_frame() -> None:
    reply = typing("for n in 1 2 3; do printf '\\r%d of 3' $n; done; printf '\\033[31m!\\033[0m\\n'\n")
    *_, last = shown_after(reply)
    assert "\n3 of 3!\n" in last
    assert "1 of 3" not in last
