"""Runs environments in a sandbox: imports their modules once, and forks a process for each rollout.

    python3 environment_server.py SOCKET MODULE CLASS SETTINGS

It needs nothing of the farm except the contract. Each connection to the socket is one rollout: lines of JSON, one
request and its reply at a time. If a process ends before its rollout, the server reports that on the connection; if a
connection is closed, its process is killed. SETTINGS are JSON: `imports`, `memory_mb`, `shared`.

The processes of a shared server cannot reach each other, the server, or the input of either: none can be inspected, and
each has only the system calls of `computing_calls.py`. The server reads nothing that they send.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from workers.environments.computing_calls import allow_only_serving, die_with_parent, hide_memory
from workers.environments.environment import Action, CalledTool, Environment, Episode, Step

READY = "ready"
_MB = 1 << 20
_MESSAGE_CHARS = 2000
_BACKLOG = 512
_CONFINED = ("can't start new thread", "No usable temporary directory")
"""Texts of errors caused by refused system calls, in addition to PermissionError."""


class PeerClosed(Exception):
    """The node has closed the connection."""


class NodeConnection:
    """A connection to the node, in the process of one rollout."""

    def __init__(self, connection: socket.socket) -> None:
        self._in: IO[bytes] = connection.makefile("rb")
        self._connection = connection

    def send(self, message: Mapping[str, Any]) -> None:
        # ASCII only: no text can end a line, and surrogates pass unchanged.
        self._connection.sendall(json.dumps(message).encode("ascii") + b"\n")

    def receive(self) -> dict[str, Any]:
        line = self._in.readline()
        if not line.endswith(b"\n"):
            raise PeerClosed
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, role: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Let the node ask the LLM of a role. Raises RuntimeError if it cannot."""
        self.send({"ask": role, "messages": [dict(each) for each in messages]})
        reply = self.receive()
        if "text" not in reply:
            raise RuntimeError(str(reply.get("refused", "the model gave no reply")))
        return str(reply["text"])


def serve(connection: socket.socket, factory: Callable[..., Environment], *, confined: bool = False) -> None:
    """Run one rollout to its end. An error is the reply to the request that caused it, and the last reply.

    If the process is `confined`, an error that may result from that names the remedy.
    """
    line = NodeConnection(connection)
    environment: Environment | None = None
    try:
        while True:
            request = line.receive()
            try:
                if environment is None:
                    environment = factory(line.ask)
                line.send({"reply": _reply(environment, request)})
            except PeerClosed:
                raise
            except BaseException as error:
                traceback.print_exc()
                words = _described(error)
                line.send({"error": words + (_remedy(words) if confined else "")})
                return
            if "close" in request:
                return
    except (PeerClosed, OSError):
        pass


def _reply(environment: Environment, request: Mapping[str, Any]) -> Any:
    if "reset" in request:
        episode = Episode(**request["reset"])
        random.seed(episode.seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(episode.seed % (1 << 32))
        begin = environment.reset(episode)
        problem = begin.problem
        return {
            "messages": [dict(each) for each in begin.messages],
            "tools": [dict(each) for each in begin.tools],
            "problem": problem
            and {"family": problem.family, "entry": dict(problem.entry), "settings": dict(problem.settings)},
        }
    if "step" in request:
        calls = tuple(CalledTool(**call) for call in request["step"]["tool_calls"])
        return _plain(environment.step(Action(request["step"]["text"], calls)))
    if "reference" in request:
        reference = getattr(environment, "reference", None)
        return None if reference is None else reference()
    reward = environment.close()
    return None if reward is None else _number(reward)


def _plain(step: Step) -> dict[str, Any]:
    return {
        "messages": [dict(each) for each in step.messages],
        "reward": _number(step.reward),
        "terminated": bool(step.terminated),
        "truncated": bool(step.truncated),
        # For people: a value that is not JSON is shown as text.
        "info": json.loads(json.dumps(dict(step.info), default=repr, skipkeys=True)),
        "answer": step.answer,
    }


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"a reward must be a number, not {value!r:.100}")
    return float(value)


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_MESSAGE_CHARS]
    except Exception:
        return type(error).__name__


def _remedy(words: str) -> str:
    """Return the remedy for an error that the system call filter may have caused."""
    if words.startswith("PermissionError") or any(each in words for each in _CONFINED):
        return (
            "; a shared environment computes and reads files: set `shared = False` in its class if it writes files, "
            "opens connections, or starts threads or processes"
        )
    return ""


class ForkServer:
    """The listening process: one fork for each connection, which it monitors through a copy of the connection."""

    def __init__(
        self, listener: socket.socket, factory: Callable[..., Environment], memory_mb: int, *, shared: bool
    ) -> None:
        self._listener = listener
        self._factory = factory
        self._memory_mb = memory_mb
        self._shared = shared
        self._wakes = socket.socketpair()
        self._rollouts: dict[int, tuple[int, socket.socket]] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def run(self) -> None:
        """Serve until it is killed."""
        # SIGCHLD interrupts the wait.
        wake, woken = self._wakes
        wake.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._poll.register(wake, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor == wake.fileno():
                    wake.recv(4096)
                else:
                    self._hang_up(descriptor)
            self._reap()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            pid = os.fork()
        except OSError as error:
            _say(connection, {"error": f"no process for a rollout: {_described(error)}"})
            connection.close()
            return
        if pid == 0:
            self._run_rollout(connection)
        self._rollouts[connection.fileno()] = (pid, connection)
        # Data is for the child; this process only has to detect that the node is gone.
        self._poll.register(connection, select.POLLRDHUP)

    def _run_rollout(self, connection: socket.socket) -> None:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            for other in (self._listener, *self._wakes, *(each for _, each in self._rollouts.values())):
                other.close()
            # So that its child processes can be killed with it.
            os.setpgid(0, 0)
            if not self._shared:
                _limit_memory(resource.RLIMIT_DATA, 5, self._memory_mb)
                serve(connection, self._factory)
                return
            # Including mappings shared with other processes.
            _limit_memory(resource.RLIMIT_AS, 0, self._memory_mb)
            if allow_only_serving():
                serve(connection, self._factory, confined=True)
            else:
                _say(connection, {"error": "the kernel has no filter of system calls: set `shared = False`"})
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _hang_up(self, descriptor: int) -> None:
        pid, _ = self._rollouts[descriptor]
        self._poll.unregister(descriptor)
        # It is not yet reaped, so the pid is still its own; it may not lead a group yet.
        os.kill(pid, signal.SIGKILL)
        _kill_group(pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for descriptor, (mine, connection) in list(self._rollouts.items()):
                if mine == pid:
                    self._ended(descriptor, connection, status)
                    _kill_group(pid)

    def _ended(self, descriptor: int, connection: socket.socket, status: int) -> None:
        """Report the end of a process; the node knows it already if the process sent the last reply."""
        del self._rollouts[descriptor]
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)
        end = f"by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"with code {os.WEXITSTATUS(status)}"
        _say(connection, {"ended": end})
        connection.close()


def _say(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.sendall(json.dumps(message).encode("ascii") + b"\n")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _limit_memory(limit: int, field: int, memory_mb: int) -> None:
    """Limit the memory in addition to current mappings, given by a field of `statm`."""
    mapped = int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
    most = mapped + memory_mb * _MB
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (most if hard < 0 else min(most, hard), hard))


def main(path: str, module: str, name: str, settings: str) -> None:
    options = json.loads(settings)
    for each in options["imports"]:
        importlib.import_module(each)
    factory = importlib.import_module(module)
    for part in name.split("."):
        factory = getattr(factory, part)
    listener = socket.socket(socket.AF_UNIX)
    # A path of any length: the kernel's limit is 107 bytes.
    folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY)
    listener.bind(f"/proc/self/fd/{folder}/{Path(path).name}.new")
    listener.listen(_BACKLOG)
    # Forks share the imported memory, unless the garbage collector writes to it.
    gc.collect()
    gc.freeze()
    Path(f"{path}.new").rename(path)
    if options["shared"]:
        hide_memory()
    ForkServer(listener, factory, options["memory_mb"], shared=options["shared"]).run()  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
