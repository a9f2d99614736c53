"""Runs the checks of a program in its test sandbox, and prints the result of each.

The program is in another process (`program_candidate.py`); the checks call it through a proxy that passes on only data,
and values are compared here. The program cannot read this process, though it has the same user: the kernel refuses to
trace it or open its descriptors (PR_SET_DUMPABLE), and the checks' imports are done before the program runs. The report
goes to a pipe that the program does not have. This process enforces the deadline itself, so that it can measure whether
the program, with all that it started, computed or slept. Two canaries accompany the checks: one must pass, one must
fail.

It runs after the sources of `program_values.py` and `descendants.py`, with the Python of a sandbox (3.8 or newer);
standard library only.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from workers.evaluators.program_tests.descendants import (
    POLL_S,
    adopt_descendants,
    descendants_cpu_s,
    end_descendants,
    runnable_wait_s,
)
from workers.evaluators.program_values import NotData, packed, receive, send, unpacked

_MAX_WORDS = 1000


class CandidateBroken(Exception):
    """The program ended, or its process sent invalid data."""


class Judge:
    """One run of the checks of one program."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._broken = ""
        self._gone = False
        self._report: dict[str, Any] = {"nonce": job["nonce"], "passed": False, "error": "", "canaries": {}}
        own_end, child_end = socket.socketpair()
        self._connection = own_end
        command = [sys.executable, "-B", "-c", job["candidate"], str(job["cpu_s"]), str(child_end.fileno())]
        null = os.open(os.devnull, os.O_RDONLY)
        # The checks' source is not in the new process, as exec replaces the process image.
        self._process = subprocess.Popen(command, stdin=null, stdout=2, stderr=2, pass_fds=[child_end.fileno()])
        child_end.close()

    def run(self) -> None:
        """Run canaries and checks, and print the report."""
        signal.signal(signal.SIGALRM, self._late)
        signal.setitimer(signal.ITIMER_REAL, self._job["limit_s"])
        try:
            self._check_candidate()
            self._ask("load", [self._job["prompt"], self._job["solution"], self._job["entry_point"]], {})
            for name, source in self._job["canaries"].items():
                self._report["canaries"][name] = self._passes(self._canary(name, source))
            self._report["passed"] = self._passes(self._checks)
        except Exception as error:
            self._report["error"] = _words(error)
        self.finish()

    def _check_candidate(self) -> None:
        """End without a report if the program's process does not work even before the program is loaded."""
        try:
            works = self._ask("echo", packed((1,)), packed({})) == 1
        except Exception:
            works = False
        if not works:
            sys.exit("the process for the program does not start")

    def _canary(self, name: str, source: str) -> Any:
        scope: dict[str, Any] = {}
        exec(compile(source, name + ".py", "exec"), scope)  # noqa: S102
        return lambda: scope[name](lambda *arguments: self._ask("echo", packed(arguments), packed({})))

    def _checks(self) -> None:
        scope: dict[str, Any] = {"__name__": "checks"}
        for name in ("prompt", "test"):
            exec(compile(self._job[name], name + ".py", "exec"), scope)  # noqa: S102
        scope[self._job["entry_point"]] = self._candidate
        scope["check"](self._candidate)

    def _candidate(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", packed(arguments), packed(keywords))

    def _passes(self, check: Any) -> bool:
        try:
            check()
        except Exception as error:
            self._report["error"] = _words(error)
            return False
        # Also if a check caught the exception.
        self._report["error"] = self._broken
        return not self._broken

    def _ask(self, what: str, arguments: Any, keywords: Any) -> Any:
        if self._broken:
            raise CandidateBroken(self._broken)
        try:
            send(self._connection, [what, arguments, keywords])
            kind, content = receive(self._connection)
            if kind == "value":
                return unpacked(content)
            name, text = (str(word)[:_MAX_WORDS] for word in content)
        except (EOFError, ConnectionError):
            self._gone = True
            raise self._breaks("its process ended") from None
        except (OSError, NotData, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise self._breaks(_words(error)) from None
        raise _exception(name, text)

    def _breaks(self, reason: str) -> CandidateBroken:
        self._broken = reason
        return CandidateBroken(reason)

    def _late(self, *_: Any) -> None:
        self.finish(timed_out=True)

    def finish(self, timed_out: bool = False) -> None:
        """Print the report, and end."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._report["end"] = self._end(timed_out)
        if timed_out:
            self._report["passed"] = False
        os.write(1, json.dumps(self._report).encode() + b"\n")
        os._exit(0)

    def _end(self, timed_out: bool) -> dict[str, Any]:
        """Return the end of the program's process; if it still runs it is killed, and has the code 0."""
        pid = self._process.pid
        waited_s = runnable_wait_s(pid)
        by_itself = self._gone and _ends(pid)
        if not by_itself:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        end_descendants()
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return {
            "code": None if timed_out else code if by_itself else 0,
            "timed_out": timed_out,
            "cpu_s": descendants_cpu_s() + time.process_time(),
            "waited_s": waited_s,
        }


def _ends(pid: int) -> bool:
    """Wait until a process that closed its connection has ended; return False if it keeps running."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        time.sleep(POLL_S)
    return False


def _exception(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            pass
    return RuntimeError(f"{name}: {text}")


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {str(error)[:_MAX_WORDS]}"
    except Exception:
        return type(error).__name__


def _import_all(sources: list[str]) -> None:
    """Import the modules of the checks before a program can change which ones are found."""
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                try:
                    importlib.import_module(name)
                except ImportError:
                    # The checks themselves will fail on it.
                    continue


def main() -> None:
    if not adopt_descendants():
        sys.exit("this process can be traced, or cannot reap")
    job = json.loads(sys.stdin.buffer.read())
    _import_all([job["prompt"], job["test"]])
    Judge(job).run()


if __name__ == "__main__":
    main()
