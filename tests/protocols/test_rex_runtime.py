"""SWE-ReX's own client on the farm, compared with the package's own runtime: equal cases give equal results."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from tests.protocols.conftest import Start, result_of
from tests.services.api import KEY, RestartableApi
from tests.services.farms import until

EXAMPLES = Path(__file__).parents[2] / "examples" / "swe_rex"
PYTHON = {"is_interactive_command": True, "expect": [">>> "]}
ALL = ("output", "exit_code", "expect_string")
CODE = ("exit_code",)


def run(command: str, **values: Any) -> tuple[str, dict[str, Any]]:
    return "run_in_session", {"command": command, "check": "silent", **values}


def execute(command: str | list[str], **values: Any) -> tuple[str, dict[str, Any]]:
    return "execute", {"command": command, "shell": isinstance(command, str), **values}


def read(path: str, **values: Any) -> tuple[str, dict[str, Any]]:
    return "read_file", {"path": path, **values}


_STREAMS = ("stdout", "stderr", "exit_code")
_CASES: list[tuple[tuple[str, dict[str, Any]], tuple[str, ...]]] = [
    (run("true", session="non_existent"), ()),
    (("close_session", {"session": "non_existent"}), ()),
    (("create_session", {"startup_timeout": 60}), ()),
    (("create_session", {}), ()),
    (("create_session", {"session": "another", "startup_timeout": 60}), ()),
    (("close_session", {"session": "another"}), ()),
    (("close_session", {"session": "another"}), ()),
    (run("echo ''"), ALL),
    (run("printf '\nx'"), ALL),
    (run("printf '\n\nx\n\n\n'"), ALL),
    (run("printf '  x'"), ALL),
    (run("echo '\n \nhello\nworld'"), ALL),
    (run("echo 'hello world'", check="raise"), ALL),
    (run("doesntexit"), CODE),
    (run("false && true"), ALL),
    (run("false || true", check="raise"), ALL),
    (run("false", check="raise"), ()),
    (run("false", check="ignore"), ALL),
    (run("true"), ALL),
    (run("", check="raise"), ALL),
    (run("\n", check="raise"), ALL),
    (run("\n\n \n", check="raise"), ALL),
    (run("\n echo 'test'\n\n", check="raise"), ALL),
    (run("\n\n\n echo 'test1' \n  \n \n echo 'test2' \n\n\n", check="raise"), ALL),
    (run("python3 <<EOF\nprint('hello world')\nprint('hello world 2')\nEOF", check="raise"), ALL),
    (run("# echo 'hello world'", check="raise"), ALL),
    (run("echo 'hello world'; echo 'hello again'", check="raise"), ALL),
    (run("echo 'hello world' && echo 'hello again'", check="raise"), ALL),
    (run("for i in {1..3};\n do echo 'hello world';\n done", check="raise"), ALL),
    (run("/usr/bin/env bash -n <<'EOF'\necho 'hello world'\nEOF", check="raise"), CODE),
    (run("[[ $env == $env ]]", check="raise"), CODE),
    (run("echo 'hw';A=();echo 'asdf'", check="raise"), ("output", "exit_code")),
    (run("A=(); false"), ("output", "exit_code")),
    (run("(a", check="raise"), ()),
    (run("a='", check="raise"), ()),
    (run("for", check="raise"), ()),
    (run("(sleep 10) &", check="raise"), CODE),
    (run("echo é漢😀"), ALL),
    (run("cd /usr && x=1"), ALL),
    (run("echo $PWD $x"), ALL),
    (run("python3", **PYTHON, timeout=60), ("exit_code", "expect_string")),
    (run("print('hello world')", **PYTHON, timeout=60), ALL),
    (run("quit()\n", is_interactive_quit=True, check="raise", timeout=60), CODE),
    (run("echo 'hello world'", check="raise"), ("output",)),
    (run("python3", is_interactive_command=True, expect=["WONTHITTHIS"], timeout=1), ()),
    (("close_session", {}), ()),
    (("create_session", {"startup_timeout": 60}), ()),
    (run("sleep 10", timeout=0.5), ()),
    (("interrupt", {"timeout": 2}), CODE),
    (run("echo 'asdf'", check="raise"), ("output",)),
    (execute("echo 'hello world'"), _STREAMS),
    (execute("echo ''"), _STREAMS),
    (execute("echo '\n \nhello world'"), _STREAMS),
    (execute(["echo", "-n", "\nhello world"]), _STREAMS),
    (execute(["echo", "hello world"]), _STREAMS),
    (execute(["sleep", "10"], timeout=0.1), ()),
    (execute("", check=True), _STREAMS),
    (execute("\n", check=True), _STREAMS),
    (execute("exit 3"), _STREAMS),
    (execute("exit 3", check=True), ()),
    (execute("a b", shell=False), ()),
    (execute(["true"], cwd="/nothere"), ()),
    (execute(["bash", "-lc", "echo 'out'; echo 'err' 1>&2"], merge_output_streams=True), _STREAMS),
    (execute(["bash", "-lc", "echo out; echo err 1>&2"]), _STREAMS),
    (("write_file", {"path": "FOLDER/new/test.txt", "content": "tést\n"}), ()),
    (read("FOLDER/new/test.txt"), ("content",)),
    (read("FOLDER/new/test.txt", encoding="ascii", errors="replace"), ("content",)),
    (read("FOLDER/new/test.txt", encoding="klingon"), ()),
    (read("FOLDER/non_existent.txt"), ()),
    (read("FOLDER/new"), ()),
    (("upload", {"source_path": "HERE/dir/file1.txt", "target_path": "FOLDER/target.txt"}), ()),
    (read("FOLDER/target.txt"), ("content",)),
    (("upload", {"source_path": "HERE/dir", "target_path": "FOLDER/target"}), ()),
    (read("FOLDER/target/file1.txt"), ("content",)),
    (read("FOLDER/target/deep/file2.txt"), ("content",)),
    (read("FOLDER/target/large"), ("content",)),
]
"""Each case, and the fields of its result that must be equal; its exceptions always must."""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The settings of the program, with files to upload."""
    (tmp_path / "dir" / "deep").mkdir(parents=True)
    (tmp_path / "dir" / "file1.txt").write_text("test1")
    (tmp_path / "dir" / "large").write_text("x" * 1024 * 1024)
    (tmp_path / "dir" / "deep" / "file2.txt").write_text("test2")
    folder = tmp_path / "own"
    yield {"examples": str(EXAMPLES), "key": KEY, "folder": str(folder), "here": str(tmp_path), "waits": False}
    shutil.rmtree(folder, ignore_errors=True)


def test_client_gets_the_results_of_the_packages_own_runtime(
    here: tuple[Embedded, RestartableApi], start: Start, files: dict[str, Any], tmp_path: Path
) -> None:
    cases = [case for case, _ in _CASES]
    program = start("swe-rex", "rex_runtime", {**files, "url": here[1].url, "cases": cases})
    said = result_of(program, tmp_path / "rex_runtime.err")
    different = []
    for (case, fields), own, farms in zip(_CASES, said["own"], said["farms"], strict=True):
        about = ("raised", *(("extra_info",) if own.get("extra_info") else ()), *fields)
        if [own.get(name) for name in about] != [farms.get(name) for name in about]:
            different.append((case, own, farms))
    assert not different, "\n".join(map(str, different))
    assert len({own["raised"] for own in said["own"] if "raised" in own}) >= 8, "errors of each class were raised"
    assert (said["alive"], said["apart"]) == (True, ["set\n", "set\n"])
    assert "DeploymentStartupError" in said["refused"]
    assert "/nowhere.sif" in said["refused"]
    with farm.connect(here[0].home) as client:
        assert not client.sandboxes.list(), "all were released"


def test_sandbox_of_a_killed_client_is_found_by_the_next_one(
    here: tuple[Embedded, RestartableApi], start: Start, files: dict[str, Any]
) -> None:
    given = {**files, "url": here[1].url, "cases": [("create_session", {"startup_timeout": 60})], "waits": True}
    killed = start("swe-rex", "rex_runtime", given)
    assert killed.stdout
    assert killed.stdout.readline() == '"waits"\n'
    with farm.connect(here[0].home) as client:
        [left] = client.sandboxes.list()
        handle = client.sandboxes.attach(left.sandbox_id)
        until(lambda: handle.exec("test", "-e", "/tmp/begun").code == 0, "its command has begun")
        killed.kill()
        assert not handle.state().ended, "a running command counts as use"
        handle.write("/tmp/go", b"")
        handle.renew(5)
        until(lambda: handle.state().ended, "its lease has run out")
