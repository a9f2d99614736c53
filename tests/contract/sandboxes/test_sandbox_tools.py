"""The tools' results on real sandboxes, as a model sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from farm.errors import ToolError
from farm.records.request import SandboxLimits
from farm.settings import Settings
from workers.plugins.interfaces import Sandbox, Tool
from workers.tools.bash import BashArguments, BashTool
from workers.tools.edit import EditTool
from workers.tools.python import PythonTool
from workers.tools.search import SearchTool

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]
PATH = "/workspace/tools/file.txt"


def call(run: Run, tool: Tool, timeout_s: float = 10, **arguments: Any) -> str:
    return str(run(tool.call(tool.arguments(**arguments), timeout_s)).text)


@pytest.fixture
def edit(sandbox: Sandbox, run: Run) -> EditTool:
    run(sandbox.write_file(PATH, b"one\ntwo\nthree\ntwo\n"))
    return EditTool(sandbox)


def test_bash_keeps_state_and_reports_exits(sandbox: Sandbox, run: Run) -> None:
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


def test_bash_renders_terminal_output(sandbox: Sandbox, run: Run) -> None:
    tool = BashTool(sandbox)
    bar = "for n in $(seq 30000); do printf '\\r%9d' $n; done; printf '\\r\\033[K\\033[32mdone\\033[0m\\n'"
    shown = run(tool.call(BashArguments.model_validate({"command": bar}), 60))
    assert shown.text == "done"
    (kept,) = shown.artefacts
    assert len(kept.data) == 30_000 * 10 + len(b"\r\033[K\033[32mdone\033[0m\n")
    command = "printf '1%%\\r50%%\\r'; read -p 'name? ' name; printf '%s\\b\\b!\\n' $name"
    assert call(run, tool, command=command, interactive=True) == "name? \n[it is running; go on with `input`]"
    assert call(run, tool, input="farm") == "farm\nfa!m\n[it has ended, exit code 0]"
    run(tool.close())


def test_python_keeps_state_and_reports_timeouts(sandbox: Sandbox, run: Run) -> None:
    tool = PythonTool(sandbox)
    assert call(run, tool, code="x = 20\nx + 1") == "Out[1]: 21"
    result = call(run, tool, timeout_s=0.3, code="import time; print('part'); time.sleep(9)")
    assert result.startswith("part\n")
    assert result.endswith("[stopped: it did not finish within 0.3 seconds; this is what it had printed]")
    assert "all variables and imports are lost" in call(run, tool, code="import os; os._exit(0)")
    run(tool.close())
    run(tool.close())


def test_view_shows_numbered_lines(edit: EditTool, run: Run) -> None:
    shown = f"Here's the result of running `cat -n` on {PATH}:\n"
    assert call(run, edit, command="view", path=PATH) == shown + "     1\tone\n     2\ttwo\n     3\tthree\n     4\ttwo"
    assert call(run, edit, command="view", path=PATH, view_range=[2, 3]) == shown + "     2\ttwo\n     3\tthree"
    assert call(run, edit, command="view", path=PATH, view_range=[4, -1]) == shown + "     4\ttwo"
    assert call(run, edit, command="view", path="/proc/cpuinfo").startswith("Here's the result")


def shell(sandbox: Sandbox, run: Run, command: str) -> str:
    result = run(sandbox.exec(["bash", "-c", command], timeout_s=60))
    assert result.code == 0, result
    return str(result.stdout.decode())


def listing(edit: EditTool, run: Run, path: str) -> list[str]:
    return call(run, edit, command="view", path=path).splitlines()[1:]


def test_folder_is_listed_two_levels_deep(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    shell(sandbox, run, "mkdir -p /workspace/l/.git/x /workspace/l/a/b/c /workspace/l/empty; ln -sfn l /workspace/link")
    shell(sandbox, run, "cd /workspace/l; touch .hidden .git/HEAD a/f a/.g $'new\nline'")
    assert listing(edit, run, "/workspace/l") == [
        "/workspace/l",
        "/workspace/l/a",
        "/workspace/l/a/b",
        "/workspace/l/a/f",
        "/workspace/l/empty",
        '"/workspace/l/new\\nline"',
    ]
    assert listing(edit, run, "/workspace/l/.git") == [
        "/workspace/l/.git",
        "/workspace/l/.git/HEAD",
        "/workspace/l/.git/x",
    ]
    assert listing(edit, run, "/workspace/l/empty/") == ["/workspace/l/empty/"]
    assert "/workspace/link/a" in listing(edit, run, "/workspace/link")
    assert "/usr" in listing(edit, run, "/")


def test_large_folder_is_listed_in_part(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    shell(sandbox, run, "mkdir -p /workspace/many/below; cd /workspace/many; touch {1..50} below/{1..4000}")
    shown = listing(edit, run, "/workspace/many")
    assert len(shown) == 52
    assert "/workspace/many/below" in shown
    *shown, note = listing(edit, run, "/workspace/many/below")
    assert note == f"[{4_000 - len(shown) + 1} more are left out; see them with another tool.]"
    shell(sandbox, run, "rm -r /workspace/many")


def test_folder_is_listed_with_only_bash(start: Start, run: Run) -> None:
    sandbox = start(env={"PATH": "/workspace/bin"})
    bare = "PATH=/usr/bin:/bin; mkdir -p /workspace/bin /workspace/l/a/b /workspace/l/.h/i; "
    run(sandbox.exec(["/bin/bash", "-c", bare + "ln -s /bin/bash /workspace/bin/bash"], timeout_s=10))
    assert listing(EditTool(sandbox), run, "/workspace/l") == ["/workspace/l", "/workspace/l/a", "/workspace/l/a/b"]


def test_create_writes_a_file(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    path = "/workspace/tools/new/é.txt"
    assert call(run, edit, command="create", path=path, file_text="é\n") == f"File created successfully at: {path}"
    assert run(sandbox.read_file(path)) == "é\n".encode()


def test_str_replace_edits_a_file(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    result = call(run, edit, command="str_replace", path=PATH, old_str="three\n", new_str="3\n3\n")
    assert f"The file {PATH} has been edited." in result
    assert "     3\t3\n     4\t3\n     5\ttwo" in result
    assert run(sandbox.read_file(PATH)) == b"one\ntwo\n3\n3\ntwo\n"
    call(run, edit, command="str_replace", path=PATH, old_str="one\n")
    assert run(sandbox.read_file(PATH)) == b"two\n3\n3\ntwo\n"


def test_insert_adds_lines(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    call(run, edit, command="insert", path=PATH, insert_line=0, insert_text="zero")
    call(run, edit, command="insert", path=PATH, insert_line=5, insert_text="five\n")
    assert run(sandbox.read_file(PATH)) == b"zero\none\ntwo\nthree\ntwo\nfive\n"


def test_edits_keep_mode_and_links_of_a_file(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    shell(sandbox, run, f"cd /workspace/tools; chmod 750 {PATH}; ln -f {PATH} hard; ln -sf {PATH} soft")
    for path in (PATH, "/workspace/tools/soft", "/workspace/tools/hard"):
        call(run, edit, command="insert", path=path, insert_line=0, insert_text="zero")
        call(run, edit, command="undo_edit", path=path)
        call(run, edit, command="create", path=path, file_text="new\n")
    assert shell(sandbox, run, f"cd /workspace/tools; stat -c '%a %h' {PATH}; readlink soft; cat hard") == (
        f"750 2\n{PATH}\nnew\n"
    )


def test_undo_restores_the_previous_contents(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    call(run, edit, command="str_replace", path=PATH, old_str="one", new_str="1")
    call(run, edit, command="insert", path=PATH, insert_line=1, insert_text="1.5")
    result = call(run, edit, command="undo_edit", path=PATH)
    assert result.startswith(
        f"Last edit to {PATH} undone successfully. Here's the result of running `cat -n` on a snippet"
    )
    assert "     1\t1\n     2\ttwo\n" in result
    shell(sandbox, run, f"echo more >>{PATH}")
    with pytest.raises(ToolError, match="something else has changed the file since"):
        call(run, edit, command="undo_edit", path=PATH)
    assert run(sandbox.read_file(PATH)) == b"1\ntwo\nthree\ntwo\nmore\n"
    shell(sandbox, run, f"rm {PATH}")
    with pytest.raises(ToolError, match="does not exist"):
        call(run, edit, command="undo_edit", path=PATH)


def test_undo_of_a_created_file_removes_it(edit: EditTool, sandbox: Sandbox, run: Run) -> None:
    shell(sandbox, run, "ln -sfn target /workspace/dangling")
    for path in ("/workspace/deep/er/new\n", "/workspace/-rf *", "/workspace/dangling"):
        call(run, edit, command="create", path=path, file_text="x")
        assert "The file had been created by it and is gone." in call(run, edit, command="undo_edit", path=path)
        with pytest.raises(ToolError, match="does not exist"):
            call(run, edit, command="view", path=path)
        with pytest.raises(ToolError, match="No edit history found"):
            call(run, edit, command="undo_edit", path=path)
    assert (
        shell(sandbox, run, "test -L /workspace/dangling && test ! -e /workspace/target; ls -A /workspace/deep/er")
        == ""
    )


def test_failed_edit_keeps_the_contents(start: Start, run: Run) -> None:
    sandbox = start(limits=SandboxLimits(file_mb=1))
    tool, held = EditTool(sandbox), b"x" * 1_000_000 + b"\n"
    run(sandbox.write_file("/workspace/f", held))
    for arguments in (
        {"command": "insert", "insert_line": 0, "insert_text": "y" * 200_000},
        {"command": "create", "file_text": "y" * 1_200_000},
    ):
        with pytest.raises(ToolError, match="/workspace/f"):
            call(run, tool, path="/workspace/f", **arguments)
        assert run(sandbox.read_file("/workspace/f")) == held


def test_hundred_concurrent_edits_succeed(sandbox: Sandbox, run: Run) -> None:
    async def one(number: int) -> bytes:
        tool: Tool = EditTool(sandbox)
        path = f"/workspace/h/{number % 10}/{number}"
        for arguments in (
            {"command": "create", "file_text": "a"},
            {"command": "insert", "insert_line": 1, "insert_text": "b"},
        ):
            await tool.call(tool.arguments(path=path, **arguments), 30)
        return await sandbox.read_file(path)

    async def all_of_them() -> list[bytes]:
        return await asyncio.gather(*(one(number) for number in range(100)))

    assert set(run(all_of_them())) == {b"a\nb"}


def test_search_key_is_not_inside_the_sandbox(start: Start, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_SEARCH", "tavily")
    monkeypatch.setenv("FARM_SEARCH_KEY", "key-that-nobody-sees")
    sandbox = start()
    tool = SearchTool(sandbox, Settings())
    result = run(
        sandbox.exec(
            ["bash", "-c", "env; cat /proc/*/environ /proc/*/cmdline /run/farm/* | tr '\\0' ' '"], timeout_s=10
        )
    )
    assert b"PATH=" in result.stdout
    assert b"nobody-sees" not in result.stdout + result.stderr
    run(tool.close())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"command": "view", "path": "tools/file.txt"}, "Maybe you meant /tools/file.txt?"),
        ({"command": "view", "path": "/none"}, "The path /none does not exist. Please provide a valid path."),
        ({"command": "view", "path": f"{PATH}/x"}, "leads through a file as if it were a directory"),
        ({"command": "view", "path": "/" + "x" * 300}, "File name too long"),
        ({"command": "view", "path": "/dev/zero"}, "/dev/zero"),
        ({"command": "view", "path": PATH, "view_range": [0, 1]}, "Invalid `view_range`"),
        ({"command": "view", "path": PATH, "view_range": [5, -1]}, r"within the lines of the file, \[1, 4\]"),
        ({"command": "view", "path": PATH, "view_range": [3, 2]}, "Invalid `view_range`"),
        ({"command": "view", "path": "/usr", "view_range": [1, 2]}, "not allowed when `path` points to a directory"),
        ({"command": "view", "path": "/bin/bash"}, "is a binary file, not a text file"),
        ({"command": "create", "path": PATH}, "`file_text` is required for command: create"),
        ({"command": "create", "path": "/workspace", "file_text": ""}, "is a directory and only the `view` command"),
        ({"command": "create", "path": f"{PATH}/x", "file_text": ""}, "leads through a file as if it were a directory"),
        ({"command": "create", "path": "/usr/x", "file_text": ""}, "Read-only file system"),
        (
            {"command": "str_replace", "path": "/workspace", "old_str": "x"},
            "is a directory and only the `view` command",
        ),
        ({"command": "str_replace", "path": PATH}, "`old_str` is required"),
        ({"command": "str_replace", "path": PATH, "old_str": "six"}, "old_str `six` did not appear verbatim in"),
        ({"command": "str_replace", "path": PATH, "old_str": ""}, "old_str is empty"),
        ({"command": "str_replace", "path": PATH, "old_str": "one  \ntwo"}, "differ from lines 1 to 2, which are:"),
        (
            {"command": "str_replace", "path": PATH, "old_str": "two"},
            r"Multiple occurrences of old_str `two` in lines \[2, 4\]",
        ),
        ({"command": "str_replace", "path": PATH, "old_str": "one", "new_str": "one"}, "are the same"),
        ({"command": "insert", "path": PATH, "insert_line": 9, "insert_text": "x"}, r"\[0, 4\]"),
        ({"command": "insert", "path": PATH, "insert_line": 1}, "`insert_text` is required"),
        ({"command": "undo_edit", "path": PATH}, f"No edit history found for {PATH}."),
    ],
)
def test_invalid_edits_are_refused(
    arguments: dict[str, Any], complaint: str, edit: EditTool, sandbox: Sandbox, run: Run
) -> None:
    with pytest.raises(ToolError, match=complaint):
        call(run, edit, **arguments)
    assert run(sandbox.read_file(PATH)) == b"one\ntwo\nthree\ntwo\n"
