"""Programs for tests, forked from a process that has imported what they need, which is most of a node's start.

For tests, a forked program is like an executed one: `/proc` shows its own command line and environment, it has its own
session and log, and it gets a signal when the process of the tests ends. Only its parent is the fork server; a test of
parents starts `python -m` itself.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from farm.cli.console import console
from farm.embedded.child_process import ChildProcess, die_with_parent
from farm.plugins import find_installed, installed
from farm.settings import settings
from farm.startup import end_process, frozen_imports
from workers.sandboxes.isolation.linux import show_as

_ROOT = Path(__file__).parents[2]
_MODULES = (
    *("workers.node.supervisor", "workers.node.command", "workers.stages.stage_functions", "workers.process.worker"),
    *("workers.process.lease_renewal", "farm.store.reports.stage_ends", "kombu.transport.redis", "numpy"),
    *("celery.concurrency.thread", "celery.worker.worker", "celery.apps.worker", "farm.cli.api", "farm.api.app"),
)
"""The imports of a node, its workers and an API, except those of `workers.queue`, whose app reads the settings."""
_ENV_START = 50
"""The field of `/proc/self/stat` with the address of the environment; the next one has its end (man proc_pid_stat)."""
_ROOM = "FARM_TESTS_ROOM"
_ROOM_BYTES = 16_000
"""The limit of a program's command line, and of its environment beyond the server's."""
_MAX_BYTES = 150_000
_MAX_FDS = 10
_FREE = ("FARM_", "PYTEST_", "PATH", "PYTHONPATH", "TMPDIR", "COLUMNS")
"""Prefixes of variables that may differ between a program and the server, as they are only read when needed."""


def program(module: str, words: Sequence[str], env: Mapping[str, str], log: Path) -> ChildProcess:
    """Start `python -m MODULE WORDS`, which gets a SIGTERM when this process ends."""
    server = _server()
    if server.serves(env):
        return _ForkedChild(server.start(module, words, env, log))
    argv = [sys.executable, "-m", module, *words]
    return ChildProcess(argv, env=env, log=log, on_parent_death=signal.SIGTERM)


def opened(
    module: str, words: Sequence[str], env: Mapping[str, str], cwd: Path = _ROOT, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[str]:
    """Start the same with pipes for its input, output and errors; for the module `-c` the first word is code."""
    server = _server()
    if server.serves(env):
        return server.open(module, words, env, cwd, pass_fds)
    argv = [sys.executable, *(["-c"] if module == "-c" else ["-m", module]), *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env=env, cwd=cwd, text=True, pass_fds=pass_fds, stdin=pipe, stdout=pipe, stderr=pipe)


def completed(
    module: str, words: Sequence[str], env: Mapping[str, str], timeout_s: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE WORDS` to its end."""
    with opened(module, words, env) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def farm_command(words: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `farm WORDS`; its output and errors go to its log."""
    return program("farm.cli.main", words, env, log).process


class _ForkedChild(ChildProcess):
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process


class _ForkedProgram(subprocess.Popen[Any]):
    """Like `Popen`; the process's parent, the server, knows its exit status."""

    _child_created = _communication_started = False
    _input = encoding = errors = None
    text_mode = True

    def __init__(self, server: _ProgramServer, pid: int, args: Sequence[str]) -> None:
        self.args, self.pid = list(args), pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)
        self._ended = select.poll()
        self._ended.register(self._pidfd, select.POLLIN)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._code(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _code(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._ended.poll(None if timeout is None else max(0.0, timeout * 1000)):
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._server.code(self.pid)
                    os.close(self._pidfd)
        return self.returncode


class _ProgramServer:
    """The fork server as the process of the tests sees it; it ends with that process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._env = dict(os.environ)
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            argv = [sys.executable, "-m", __name__, str(its.fileno()), "-" * _ROOM_BYTES]
            env = self._env | {_ROOM: "-" * _ROOM_BYTES}
            self._process = subprocess.Popen(
                argv, cwd=_ROOT, env=env, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        atexit.register(self.end)

    def serves(self, env: Mapping[str, str]) -> bool:
        """Tell whether a program with this environment would import the same modules as the server."""
        differing = {name for name, _ in self._env.items() ^ env.items()}
        size = sum(len(name) + len(value) + 2 for name, value in env.items())
        own_size = sum(len(name) + len(value) + 2 for name, value in self._env.items())
        return all(name.startswith(_FREE) for name in differing) and size < own_size + _ROOM_BYTES

    def start(self, module: str, words: Sequence[str], env: Mapping[str, str], log: Path) -> _ForkedProgram:
        """Start a program whose output and errors go to a log."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return self._started(module, words, env, Path.cwd(), {1: output.fileno(), 2: output.fileno()})

    def open(
        self, module: str, words: Sequence[str], env: Mapping[str, str], cwd: Path, pass_fds: Sequence[int]
    ) -> _ForkedProgram:
        """Start a program with pipes; it gets the descriptors `pass_fds`, by the same numbers."""
        with _pipes() as (own, its):
            process = self._started(module, words, env, cwd, {**its, **{fd: fd for fd in pass_fds}})
            process.stdin, process.stdout, process.stderr = own
        return process

    def _started(
        self, module: str, words: Sequence[str], env: Mapping[str, str], cwd: Path, fds: Mapping[int, int]
    ) -> _ForkedProgram:
        start = {"module": module, "words": [*words], "env": {**env}, "cwd": str(cwd), "fds": [*fds]}
        return _ForkedProgram(self, self._ask({"start": start}, [*fds.values()]), [module, *words])

    def code(self, pid: int) -> int:
        return self._ask({"ended": pid})

    def _ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> int:
        answer = b""
        with self._lock, suppress(ConnectionError):
            socket.send_fds(self._control, [json.dumps(request).encode()], fds)
            answer = self._control.recv(_MAX_BYTES)
        if not answer:
            code = self._process.wait()
            raise ConnectionError(f"the fork server of the tests has ended with status {code}; the reason is on stderr")
        result = json.loads(answer)
        if isinstance(result, str):
            raise OSError(f"the fork server of the tests cannot fork: {result}")
        return int(result)

    def end(self) -> None:
        self._control.close()
        self._process.wait()


@contextmanager
def _pipes() -> Iterator[tuple[list[IO[str]], dict[int, int]]]:
    """Yield our ends of three pipes, as files, and those of a program, by its numbers; close the latter afterwards."""
    (read, to), (output, write), (errors, write_errors) = os.pipe(), os.pipe(), os.pipe()
    its = {0: read, 1: write, 2: write_errors}
    try:
        yield [os.fdopen(to, "w"), os.fdopen(output), os.fdopen(errors)], its
    finally:
        for fd in its.values():
            os.close(fd)


@cache
def _server() -> _ProgramServer:
    return _ProgramServer()


def end_server() -> None:
    """End the fork server, if there is one, before this process ends."""
    if _server.cache_info().currsize:
        _server().end()
        _server.cache_clear()


def _serve(control: socket.socket) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MAX_BYTES, _MAX_FDS)
        if not message:
            return
        request = json.loads(message)
        answer: int | str
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            server = os.getpid()
            try:
                answer = os.fork()
            except OSError as error:
                answer = str(error)
            if answer == 0:
                control.close()
                _run_program(server, request["start"], fds)
            for fd in fds:
                os.close(fd)
        control.send(json.dumps(answer).encode())


def _run_program(server: int, start: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Act as the program, with these descriptors, and end with it."""
    code: int | str | None = 1
    try:
        os.setsid()
        die_with_parent(server, signal.SIGTERM)
        _take_descriptors(start["fds"], fds)
        os.chdir(start["cwd"])
        _take_environment(start["env"])
        module, words = start["module"], start["words"]
        if module == "-c":
            show_as([sys.executable, module, *words])
            sys.argv = [module, *words[1:]]
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [module, *words]
            show_as([sys.executable, "-m", *sys.argv])
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(code if isinstance(code, int) else int(code is not None))


def _take_descriptors(numbers: Sequence[int], fds: Sequence[int]) -> None:
    """Give descriptors their numbers, and close the rest of the server's."""
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in fds]
    for number, fd in zip(numbers, aside, strict=True):
        os.dup2(fd, number)
    for fd in {*aside, *fds} - {*numbers}:
        os.close(fd)
    # the server's streams know whether its own files can be sought
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _take_environment(env: dict[str, str]) -> None:
    """Set these variables, also for `/proc`; the folders of PYTHONPATH are added to the import path."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # the first of them is the third
    start, end = (int(field) for field in fields[_ENV_START - 3 :][:2])
    # afterwards no variable that the C library uses lies there
    os.environ.clear()
    os.environ.update(env)
    text = b"\0".join(os.fsencode(f"{name}={value}") for name, value in env.items())
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    folders = env.get("PYTHONPATH", "").split(os.pathsep)
    added = [folder for folder in folders if folder and folder not in sys.path]
    if added:
        sys.path[1:1] = added
        find_installed()
    settings.cache_clear()
    tempfile.tempdir = None
    # the console was made when its module was loaded
    if columns := env.get("COLUMNS"):
        console.width = int(columns)


def main() -> None:
    """Run the server until the process of the tests ends."""
    os.environ.pop(_ROOM)
    with frozen_imports():
        for name in _MODULES:
            importlib.import_module(name)
        installed("farm.handlers")
    with suppress(ConnectionError), socket.socket(fileno=int(sys.argv[1])) as control:
        _serve(control)


if __name__ == "__main__":
    main()
