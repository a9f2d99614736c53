"""Workers of pytest-xdist, forked from a process that has imported all tests.

Otherwise each worker would take the time of that import; in a new clone, without bytecode, they would all compile the
same modules at once. xdist starts a worker by a command that gets the worker's first line of code as its input: our
command hands its pipes to the forking process, and lives as long as the worker.
"""

from __future__ import annotations

import gc
import os
import shlex
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import pytest

_PIPES = 3
_LATE = ("anthropic", "anthropic.types.beta")
"""Packages that tests in several workers import late. They take a second, which a run of a few files should not."""
_FEW_FILES = 100


def fork_workers(config: pytest.Config, folder: Path, suites: tuple[str, ...]) -> None:
    """Make this run fork its workers, if they are processes of this machine."""
    specs = config.getoption("tx", [])
    if not specs or set(specs) != {"popen"}:
        return
    address = str(folder / "workers.sock")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(len(specs))
    pid = os.fork()
    if pid == 0:
        _serve(listening, config, suites)
    listening.close()
    config.add_cleanup(lambda: _end(pid))
    # -I -S: it imports nothing but this file
    command = shlex.join([sys.executable, "-I", "-S", __file__, address])
    config.option.tx = [f"popen//python={command}"] * len(specs)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _serve(listening: socket.socket, config: pytest.Config, suites: tuple[str, ...]) -> NoReturn:
    """Import the tests, then fork a worker for each request, until this process is killed."""
    from farm.startup import frozen_imports
    from workers.sandboxes.isolation.linux import die_with_parent

    try:
        # Ctrl-C at a terminal is for the workers, and for xdist
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        die_with_parent(signal.SIGKILL)
        with frozen_imports():
            _import_tests(config, suites)
        while True:
            caller, _ = listening.accept()
            with caller:
                _, pipes, _, _ = socket.recv_fds(caller, 1, _PIPES)
                if os.fork() == 0:
                    listening.close()
                    _work(pipes)
                for pipe in pipes:
                    os.close(pipe)
    finally:
        os._exit(1)


def _import_tests(config: pytest.Config, suites: tuple[str, ...]) -> None:
    """Import the tests of this run as pytest would; pytest then finds them imported.

    A worker imports a failing file again and reports its error. So its module must go: pytest leaves half of it.
    """
    from _pytest.pathlib import import_path

    files = _test_files(config, suites)
    for name in _LATE if len(files) > _FEW_FILES else ():
        import_module(name)
    for path in files:
        known = set(sys.modules)
        try:
            import_path(path, root=config.rootpath, mode="importlib", consider_namespace_packages=False)
        except BaseException:
            for name in sys.modules.keys() - known:
                if name.startswith("tests."):
                    del sys.modules[name]


def _test_files(config: pytest.Config, suites: tuple[str, ...]) -> list[Path]:
    folders = [config.rootpath / "tests" / suite for suite in suites]
    named = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    return sorted(
        file
        for folder in folders
        for path in named
        if folder.is_relative_to(path) or path.is_relative_to(folder)
        for file in ([path] if path.suffix else max(path, folder).rglob("test_*.py"))
    )


def _work(pipes: list[int]) -> NoReturn:
    """Act as a worker started by the command, and end with it. The connection ends with this process."""
    from types import ModuleType

    from farm.startup import end_process

    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for at, pipe in enumerate(pipes):
            os.dup2(pipe, at)
            os.close(pipe)
        # collections of young objects would take a twentieth of the time
        gc.set_threshold(20_000, *gc.get_threshold()[1:])
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(at, mode) for at, mode in enumerate("rww"))
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec("import sys;exec(eval(sys.stdin.readline()))", main.__dict__)
        code = 0
    finally:
        end_process(code)


def main(address: str) -> None:
    """Request a worker, and live as long as it does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"-"], list(range(_PIPES)))
        for at in range(_PIPES - 1):
            os.close(at)
        server.recv(1)


if __name__ == "__main__":
    main(sys.argv[1])
