"""The server of the python tool inside the sandbox: one IPython that runs cells from an inherited socket.

Standard library and IPython only. The main thread runs the cells, so that SIGINT reaches them. Output goes to
descriptors 1 and 2, so it includes that of child processes and C code. `prepare` runs once, outside any sandbox, in the
zygote that forks the interpreters; `serve` runs inside.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from workers.sandboxes.kernel import cell_protocol

PACKAGES = "ipython"
"""The folder, next to this file, of the packages that are imported here."""

_WARM_UP = ("import json, math, re, random, collections, itertools, functools, datetime, subprocess\n1 + 1", "1 / 0")
# imported early: a later import would load system libraries, of which an image may have another version
_LIBRARIES = ("_bz2", "_ctypes", "_decimal", "_hashlib", "_lzma", "_sqlite3", "_ssl", "zlib")


class InlineFigures:
    """An import hook that makes matplotlib's figures images of the cell.

    The variable MPLBACKEND is not used, because programs would inherit it and cannot display images here.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "matplotlib":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_set(module: ModuleType) -> None:
                run(module)
                module.rcParams["backend"] = "module://matplotlib_inline.backend_inline"

            spec.loader.exec_module = run_and_set  # type: ignore[method-assign]
        return spec


def prepare() -> SimpleNamespace:
    """Create an IPython without files, threads or colours, and its image collector; run its first cells."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.profiledir import ProfileDir
    from traitlets import Type
    from traitlets.config import Config

    images = cell_protocol.Images()

    class Publisher(DisplayPublisher):
        def publish(self, data: Mapping[str, Any], *_: object, **__: object) -> None:
            note = images.add(data)
            print(*filter(None, (data.get("text/plain"), note)), sep="\n")

        def clear_output(self, wait: bool = False) -> None:
            pass

    class Hook(DisplayHook):
        def write_format_data(self, format_dict: dict[str, Any], md_dict: object = None) -> None:
            super().write_format_data(format_dict, md_dict)
            if note := images.add(format_dict):
                print(note)
            # the rest goes to the history
            for media_type in cell_protocol.MEDIA_TYPES:
                format_dict.pop(media_type, None)

        def cull_cache(self) -> None:
            """Drop old values without a warning."""
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                super().cull_cache()  # type: ignore[no-untyped-call]

    class Profile(ProfileDir):
        def _mkdir(self, *_: object) -> bool:
            return False

    class Shell(InteractiveShell):
        displayhook_class = Type(Hook)
        display_pub_class = Type(Publisher)

        @contextlib.contextmanager
        def _tee(self, channel: str) -> Iterator[None]:
            """Keep no copy of the output."""
            yield

        def _format_exception_for_storage(self, *_: object, **__: object) -> dict[str, str]:
            """Keep no traceback."""
            return {}

        def ask_exit(self) -> None:
            """Print that the session continues, at `exit` and `quit`."""
            print("The session stays; there is no need to leave it.")

        def system(self, command: str) -> None:
            """Run a `!command` as a plain child: its output is not piped through here, and ^C ends it."""
            _flush()
            self.system_raw(command)  # type: ignore[no-untyped-call]

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "NoColor"
    config.InteractiveShell.autoindent = False
    config.InteractiveShell.cache_size = 100
    # an existing folder, because nothing may be created where this runs
    shell: Any = Shell.instance(config=config, ipython_dir="/", profile_dir=Profile())
    shell.display_formatter.active_types = ["text/plain", *cell_protocol.MEDIA_TYPES]
    for library in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):  # noqa: PTH123
        for cell in _WARM_UP:
            shell.run_cell(cell, store_history=True)
    shell.reset()
    return SimpleNamespace(shell=shell, images=images)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


class Output:
    """Descriptors 1 and 2 and Python's streams on them, restored before each cell."""

    def __init__(self) -> None:
        self._saved = os.dup(1)

    def begin(self) -> None:
        for number in (1, 2):
            os.dup2(self._saved, number)
        for name in ("stdout", "stderr"):
            if getattr(getattr(sys, name), "closed", True):
                setattr(sys, name, self._stream(1 if name == "stdout" else 2))
                setattr(sys, f"__{name}__", getattr(sys, name))

    def _stream(self, number: int) -> object:
        return open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def run_cell(shell: Any, output: Output, code: str) -> str:
    """Run a cell and return the name of its error, if any. An interrupt at any point counts for the cell."""
    error = ""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output.begin()
        result = shell.run_cell(code, store_history=True)
        failed = result.error_in_exec or result.error_before_exec
        error = type(failed).__name__ if failed is not None else ""
        _flush()
    except KeyboardInterrupt:
        error = "KeyboardInterrupt"
    except SystemExit:
        error = "SystemExit"
    while signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # an interrupt that came too late is raised here
        with contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _flush()
    return error


def _announce_cpu_limit() -> None:
    """Print the reason at SIGXCPU, which is sent shortly before the limit kills the process."""
    seconds, _ = resource.getrlimit(resource.RLIMIT_CPU)

    def give_up(*_: object) -> None:
        _flush()
        os.write(2, f"\n[CPU time limit reached: {seconds} seconds]\n".encode())
        os._exit(1)

    signal.signal(signal.SIGXCPU, give_up)


def serve(connection: socket.socket, prepared: SimpleNamespace) -> None:
    """Adopt, inside the sandbox, the state of an interpreter started there, and run cells. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.tzset()
    _announce_cpu_limit()
    shell = prepared.shell
    folder = os.environ.get("IPYTHONDIR", "/tmp/.ipython")  # noqa: S108
    # the policy may have put anything there
    with contextlib.suppress(OSError):
        shell.ipython_dir = folder
        shell.profile_dir.location = f"{folder}/profile_default"
    shell.home_dir = os.environ.get("HOME", "/")
    sys.meta_path.insert(0, InlineFigures())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [""]
    output = Output()
    connection.sendall(cell_protocol.packed({"ready": True}))
    cell_protocol.serve(connection, lambda code: run_cell(shell, output, code), prepared.images)


def main() -> None:
    """Serve inside the sandbox. The argument is `FOLDER`, which has the kernels' files."""
    cell_protocol.leave_only(sys.argv[1], PACKAGES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=cell_protocol.CONNECTION), prepare())
