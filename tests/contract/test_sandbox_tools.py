"""The tools on real sandboxes: what a model is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farm.errors import ToolError
from workers.interfaces import Sandbox, Tool
from workers.tools.bash import BashTool
from workers.tools.edit import EditTool
from workers.tools.python import PythonTool

Run = Callable[[Any], Any]
PATH = "/workspace/tools/file.txt"


def call(run: Run, tool: Tool, timeout_s: float = 10, **arguments: Any) -> str:
    return str(run(tool.call(tool.arguments(**arguments), timeout_s)).text)


@pytest.fixture
def edit(sandbox: Sandbox, run: Run) -> EditTool:
    run(sandbox.write_file(PATH, b"one\ntwo\nthree\ntwo\n"))
    return EditTool(sandbox)


def test_bash(sandbox: Sandbox, run: Run) -> None:
    tool = BashTool(sandbox)
    assert call(run, tool, command="cd /usr; X=1; echo hi") == "hi"
    assert call(run, tool, command="echo $X $PWD; false") == "1 /usr\n[exit code 1]"
    assert call(run, tool, timeout_s=0.3, command="echo part; sleep 9") == (
        "part\n[stopped: it did not finish within 0.3 seconds; this is what it had written]"
    )
    assert "a new one was started in /usr" in call(run, tool, command="exit 0")
    assert call(run, tool, command="true") == ""
    run(tool.close())
    run(tool.close())


def test_python(sandbox: Sandbox, run: Run) -> None:
    tool = PythonTool(sandbox)
    assert call(run, tool, code="x = 20\nx + 1") == "Out[1]: 21"
    told = call(run, tool, timeout_s=0.3, code="import time; print('part'); time.sleep(9)")
    assert told.startswith("part\n")
    assert told.endswith("[stopped: it did not finish within 0.3 seconds; this is what it had printed]")
    assert "all variables and imports are lost" in call(run, tool, code="import os; os._exit(0)")
    run(tool.close())
    run(tool.close())


def test_view(edit: EditTool, run: Run) -> None:
    shown = f"Here's the result of running `cat -n` on {PATH}:\n"
    assert call(run, edit, command="view", path=PATH).startswith(shown + "     1\tone\n     2\ttwo\n")
    assert call(run, edit, command="view", path=PATH, view_range=[2, 3]) == shown + "     2\ttwo\n     3\tthree"
    assert call(run, edit, command="view", path=PATH, view_range=[4, -1]) == shown + "     4\ttwo\n     5\t"
    assert call(run, edit, command="view", path="/workspace/tools").splitlines()[1:] == ["/workspace/tools", PATH]


def test_create(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    path = "/workspace/tools/new/é.txt"
    assert call(run, edit, command="create", path=path, file_text="é\n") == f"File created successfully at: {path}"
    assert run(sandbox.read_file(path)) == "é\n".encode()


def test_str_replace(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    told = call(run, edit, command="str_replace", path=PATH, old_str="three\n", new_str="3\n3\n")
    assert f"The file {PATH} has been edited." in told
    assert "     3\t3\n     4\t3\n     5\ttwo" in told
    assert run(sandbox.read_file(PATH)) == b"one\ntwo\n3\n3\ntwo\n"
    call(run, edit, command="str_replace", path=PATH, old_str="one\n")
    assert run(sandbox.read_file(PATH)) == b"two\n3\n3\ntwo\n"


def test_insert(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    call(run, edit, command="insert", path=PATH, insert_line=0, insert_text="zero")
    call(run, edit, command="insert", path=PATH, insert_line=5, insert_text="five\n")
    assert run(sandbox.read_file(PATH)) == b"zero\none\ntwo\nthree\ntwo\nfive\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"command": "view", "path": "tools/file.txt"}, "Maybe you meant /tools/file.txt?"),
        ({"command": "view", "path": "/none"}, "/none: No such file or directory"),
        ({"command": "view", "path": PATH, "view_range": [0, 1]}, "Invalid `view_range`"),
        ({"command": "view", "path": PATH, "view_range": [3, 2]}, "Invalid `view_range`"),
        ({"command": "view", "path": "/usr", "view_range": [1, 2]}, "not allowed when `path` points to a directory"),
        ({"command": "view", "path": "/usr/bin/bash"}, "not a text file"),
        ({"command": "create", "path": PATH}, "`file_text` is required for command: create"),
        ({"command": "create", "path": "/usr/x", "file_text": ""}, "Read-only file system"),
        ({"command": "str_replace", "path": PATH}, "`old_str` is required"),
        ({"command": "str_replace", "path": PATH, "old_str": "six"}, "old_str `six` did not appear verbatim in"),
        ({"command": "str_replace", "path": PATH, "old_str": ""}, "did not appear verbatim"),
        (
            {"command": "str_replace", "path": PATH, "old_str": "two"},
            r"Multiple occurrences of old_str `two` in lines \[2, 4\]",
        ),
        ({"command": "str_replace", "path": PATH, "old_str": "one", "new_str": "one"}, "are the same"),
        ({"command": "insert", "path": PATH, "insert_line": 9, "insert_text": "x"}, r"\[0, 4\]"),
        ({"command": "insert", "path": PATH, "insert_line": 1}, "`insert_text` is required"),
    ],
)
def test_mistakes(arguments: dict[str, Any], complaint: str, edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    with pytest.raises(ToolError, match=complaint):
        call(run, edit, **arguments)
    assert run(sandbox.read_file(PATH)) == b"one\ntwo\nthree\ntwo\n"
