"""The other end of the python tool, inside the sandbox: one IPython, cells in and results out on an inherited socket.

Standard library and IPython only. The main thread runs the cells, so that SIGINT reaches them; output is caught at the
descriptors, so that what child processes and C code print is part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

HEADER = struct.Struct("!II")


def receive(connection: socket.socket, n_bytes: int) -> bytes:
    """Exactly so many bytes. Raises EOFError if the other end is closed."""
    data = bytearray()
    while len(data) < n_bytes:
        chunk = connection.recv(n_bytes - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def send(connection: socket.socket, head: dict[str, Any], body: bytes) -> None:
    """A message: the lengths of both parts, a JSON object, bytes."""
    encoded = json.dumps(head).encode()
    connection.sendall(HEADER.pack(len(encoded), len(body)) + encoded + body)


def make_shell() -> Any:
    """An IPython without files, threads or colours."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "NoColor"
    config.InteractiveShell.autoindent = False
    config.InteractiveShell.cache_size = 100
    return InteractiveShell.instance(config=config)


class Capture:
    """Standard output and error, of this process and its children, into a file in memory."""

    def __enter__(self) -> Capture:
        self._memory = os.memfd_create("cell")
        self._saved = [os.dup(1), os.dup(2)]
        for number in (1, 2):
            os.dup2(self._memory, number)
        return self

    def __exit__(self, *_: object) -> None:
        for stream, number, saved in ((sys.stdout, 1, self._saved[0]), (sys.stderr, 2, self._saved[1])):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
            os.dup2(saved, number)
            os.close(saved)

    def take(self, limit: int) -> bytes:
        """The head and the tail of what was written."""
        size = os.fstat(self._memory).st_size
        if size <= limit:
            kept = os.pread(self._memory, size, 0)
        else:
            half = limit // 2
            gap = b"\n[... %d bytes left out ...]\n" % (size - 2 * half)
            kept = os.pread(self._memory, half, 0) + gap + os.pread(self._memory, half, size - half)
        os.close(self._memory)
        return kept


def run_cell(shell: Any, code: str, limit: int) -> tuple[str, bytes]:
    """The name of the error, if any, and the output. An interrupt at any point is the cell's."""
    error = ""
    with Capture() as capture:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            result = shell.run_cell(code, store_history=True)
            failed = result.error_in_exec or result.error_before_exec
            error = type(failed).__name__ if failed is not None else ""
        except KeyboardInterrupt:
            error = "KeyboardInterrupt"
        except SystemExit:
            error = "SystemExit"
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    return error, capture.take(limit)


def serve(connection: socket.socket, shell: Any) -> None:
    """Cells, until the other end is closed."""
    while True:
        try:
            n_head, n_body = HEADER.unpack(receive(connection, HEADER.size))
            head = json.loads(receive(connection, n_head))
            code = receive(connection, n_body).decode()
        except EOFError:
            os._exit(0)
        error, output = run_cell(shell, code, head["limit"])
        send(connection, {"error": error}, output)


def main() -> None:
    """`kernel_server.py FD FOLDER`: the socket, and where IPython is if the sandbox has none of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    # last, so that whatever the sandbox's own Python has wins
    sys.path[:] = [*sys.path[1:], sys.argv[2]]
    shell = make_shell()
    sys.path.insert(0, "")
    sys.argv = [""]
    send(connection, {"pid": os.getpid()}, b"")
    serve(connection, shell)


if __name__ == "__main__":
    main()
