"""The bare shell's program: whatever the policy writes, it goes on, and what is typed arrives whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from workers.agents.presets import python_presets
from workers.testing.serving import serving

PROGRAM = Path(python_presets.__file__).parent / "programs/terminal_program.py"
DONE = json.dumps({"commands": [], "task_complete": True, "analysis": "mended"})


def shown_after(*said: str) -> list[str]:
    """Return what the program shows a policy that says these."""
    turns, shown = iter([*said, DONE]), []

    async def answer(request: Request) -> JSONResponse:
        shown.append((await request.json())["messages"][-1]["content"])
        return JSONResponse({"choices": [{"message": {"content": next(turns)}}]})

    with serving(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])) as url:
        more = {"MODEL": "m", "OPENAI_API_KEY": "k", "OPENAI_BASE_URL": f"{url}/v1", "TOOL_S": "60", "MAX_TURNS": "9"}
        ended = subprocess.run(
            [sys.executable, PROGRAM], input=b"a task", capture_output=True, timeout=300, env={**os.environ, **more}
        )
    assert (ended.returncode, ended.stdout) == (0, b"mended\n"), ended.stderr
    return shown


def typing(keys: Any, duration: Any = 30) -> str:
    return json.dumps({"commands": [{"keystrokes": keys, "duration": duration}]})


@pytest.mark.parametrize(
    "said",
    [
        *("", "{", "[]", "nothing", '{"commands": 5}', '{"commands": "ls"}', '{"commands": {"keystrokes": "ls"}}'),
        *(typing(5), typing("ls", "abc"), typing("ls", [1]), typing("ls", float("nan"))),
        '{"commands": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_an_answer_that_is_none_is_told_so(said: str) -> None:
    assert "Your answer could not be read: " in shown_after(said)[-1]


@pytest.mark.parametrize("said", ['{"commands": null}', "{}", typing("true\n", 10**400), typing("true\n", -1)])
def test_what_says_little_is_an_answer(said: str) -> None:
    assert shown_after(said)[-1].startswith("The terminal:")


def test_a_long_file_is_typed_whole(tmp_path: Path) -> None:
    lines = [f"line {n} of a long file" for n in range(4000)]
    keys = "\n".join([f"cat >{tmp_path}/typed <<'E'", *lines, "E", "wc -l <typed", ""]).replace(
        "<typed", f"<{tmp_path}/typed"
    )
    assert "4000" in shown_after(typing(keys, 60))[-1]
    assert (tmp_path / "typed").read_text().splitlines() == lines


def test_a_shell_that_has_ended_is_said_to_have() -> None:
    assert all("[the shell has ended]" in each for each in shown_after(typing("exit\n"), typing("ls\n"))[1:])
