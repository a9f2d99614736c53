"""The fork server of the tests' own programs: it fails with one clear error, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import preloaded
from tests.services.farms import until

_PROGRAM = ("http.server", ["--bind", "127.0.0.1", "0"])


@pytest.fixture
def server() -> Iterator[preloaded._ProgramServer]:
    """Yield a server of this test's own."""
    result = preloaded._ProgramServer()
    yield result
    result.end()


def test_killed_server_is_reported_and_ends_its_programs(server: preloaded._ProgramServer, tmp_path: Path) -> None:
    program = server.start(*_PROGRAM, os.environ, tmp_path / "log")
    server._process.kill()
    for ask in (lambda: program.wait(60), lambda: server.start(*_PROGRAM, os.environ, tmp_path / "log")):
        with pytest.raises(ConnectionError, match=r"fork server of the tests has ended with status -9"):
            ask()


def test_server_with_a_failed_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "celery.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = preloaded._ProgramServer()
    with pytest.raises(ConnectionError, match=r"fork server of the tests has ended with status 1"):
        broken.start(*_PROGRAM, os.environ, tmp_path / "log")
    broken.end()


def test_killed_test_process_leaves_no_server_or_program(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from tests.services import preloaded as p; server = p._server(); "
    code += f"one = p.program({_PROGRAM[0]!r}, {_PROGRAM[1]!r}, os.environ, Path(sys.argv[1])); "
    code += "print(server._process.pid, one.pid, flush=True); input()"
    argv = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout
        pids = [int(word) for word in tests.stdout.readline().split()]
        assert len(pids) == 2
        tests.send_signal(signal.SIGKILL)
    until(lambda: not any(_is_alive(pid) for pid in pids), "the server and its program have ended")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
