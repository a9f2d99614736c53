"""A client for any Jupyter kernel that runs inside the sandbox next to the kernel, with the protocol of
`ipython_server.py`.

It runs inside because the policy can modify a kernel, and the kernel's ZeroMQ messages are unbounded: here they use the
sandbox's memory and not the node's. The sockets between the two are in their own folder with mode 0700. Standard
library and jupyter_client only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

from workers.sandboxes.kernel import cell_protocol

PACKAGES = "jupyter"
"""The folder, next to the kernels' modules, of the packages that are imported here."""
NAME = "SANDBOX_KERNEL"
"""The variable with the name of the requested kernel."""

_START_S = 60.0
_LOG_BYTES = 4096
_IDLE_MS = 1000
"""Milliseconds to wait for a cell's last output after its reply, because a flooded kernel drops messages."""


def prepare() -> SimpleNamespace:
    """Import the modules that bridges need, once for all and before the sandbox, which may lack them, is joined."""
    import jupyter_client.provisioning.local_provisioner  # noqa: F401
    import zmq
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager

    return SimpleNamespace(zmq=zmq, specs=KernelSpecManager, manager=KernelManager)


class Bridge:
    """One kernel, its client, and the state of the running cell."""

    def __init__(self, name: str, prepared: SimpleNamespace) -> None:
        self._zmq = prepared.zmq
        folder = _socket_folder()
        self._kernel = prepared.manager(
            kernel_name=name,
            kernel_spec_manager=prepared.specs(ensure_native_kernel=False),
            transport="ipc",
            ip=str(folder / "socket"),
            connection_file=str(folder / "connection.json"),
        )
        argv = self._kernel.kernel_spec.argv
        # otherwise `python` would be replaced by the interpreter that runs here
        argv[0] = shutil.which(argv[0]) or argv[0]
        self._log = _Log()
        self._kernel.start_kernel(stdout=self._log.write_end, stderr=self._log.write_end)
        self._log.begin()
        self._client = self._kernel.client()
        self._client.start_channels(stdin=False, hb=False)
        try:
            self._client.wait_for_ready(timeout=_START_S)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {self._log.last_line()}") from error
        self._death = os.pidfd_open(self._kernel.provisioner.pid)
        self.images = cell_protocol.Images()
        self._interrupted, wake = os.pipe()
        for number in (self._interrupted, wake):
            os.set_blocking(number, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, lambda *_: None)

    def run(self, code: str) -> str:
        """Run a cell and return the name of its error, if any. Exits this process if the kernel ends."""
        poller = self._zmq.Poller()
        iopub, shell = self._client.iopub_channel, self._client.shell_channel
        for readable in (iopub.socket, shell.socket, self._death, self._interrupted):
            poller.register(readable, self._zmq.POLLIN)
        self._take_interrupts()
        self._cell = self._client.execute(code, allow_stdin=False)
        self._idle, error = False, None
        while not (self._idle and error is not None):
            ready = dict(poller.poll(None if error is None else _IDLE_MS))
            if not ready:
                break
            if self._interrupted in ready and self._take_interrupts():
                self._kernel.interrupt_kernel()
            for message in _waiting(iopub):
                self._show(message)
            for message in _waiting(shell):
                if message["parent_header"].get("msg_id") == self._cell:
                    error = message["content"].get("ename", "")
            if self._death in ready:
                _write(self._log.text())
                os._exit(0)
        return error or ""

    def _take_interrupts(self) -> bool:
        try:
            return bool(os.read(self._interrupted, 1024))
        except BlockingIOError:
            return False

    def _show(self, message: dict[str, Any]) -> None:
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                _write(content["text"])
            case "display_data" | "update_display_data":
                self._show_data(content["data"])
            case "execute_result":
                self._show_data(content["data"], f"Out[{content['execution_count']}]: ")
            case "error":
                _write("\n".join(content["traceback"]) + "\n")
            case "status" if message["parent_header"].get("msg_id") == self._cell:
                self._idle = self._idle or content["execution_state"] == "idle"

    def _show_data(self, data: dict[str, Any], prompt: str = "") -> None:
        note = self.images.add(data)
        text = data.get("text/plain", "")
        if text or prompt:
            _write(f"{prompt}{chr(10) if prompt and chr(10) in text else ''}{text}\n")
        if note:
            _write(note + "\n")


class _Log:
    """A kernel's own standard output and error, read so that the kernel never blocks. Only the end is kept.

    A kernel that forwards the output of its cells' children, such as ipykernel, writes it here, too.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._chunks: deque[bytes] = deque(maxlen=2)

    def begin(self) -> None:
        """Start to read, and close the write end here, because the kernel has it."""
        os.close(self.write_end)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while chunk := os.read(self._read_end, _LOG_BYTES):
            self._chunks.append(chunk)

    def text(self) -> str:
        return b"".join(self._chunks).decode(errors="replace")[-_LOG_BYTES:]

    def last_line(self) -> str:
        return (self.text().strip().splitlines() or ["it printed nothing"])[-1]


def _socket_folder() -> Path:
    """Create a folder for the sockets and remove those of killed bridges in this sandbox."""
    parent = Path("/run/farm" if os.access("/run/farm", os.W_OK) else tempfile.gettempdir())
    for path in parent.glob("kernel-*-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"kernel-{os.getpid()}-", dir=parent))


def _waiting(channel: Any) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(Empty):
        while True:
            yield channel.get_msg(timeout=0)


def _write(text: str) -> None:
    data = memoryview(text.encode("utf-8", "replace"))
    while data:
        data = data[os.write(1, data) :]


def _kernel_folders() -> str:
    """Return the search path of kernel descriptions: `share/jupyter` in the prefix of every folder on PATH."""
    folders = [Path(folder).parent / "share/jupyter" for folder in os.environ["PATH"].split(":")]
    return ":".join(dict.fromkeys(map(str, folders)))


def serve(connection: socket.socket, prepared: SimpleNamespace) -> None:
    """Start the kernel inside the sandbox and forward cells to it. Returns only if that fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name = os.environ.pop(NAME)
    os.environ["JUPYTER_PATH"] = ":".join(filter(None, (os.environ.get("JUPYTER_PATH"), _kernel_folders())))
    try:
        bridge = Bridge(name, prepared)
    except Exception as error:
        connection.sendall(cell_protocol.packed({"failed": f"{type(error).__name__}: {error}"}))
        return
    connection.sendall(cell_protocol.packed({"ready": True}))
    cell_protocol.serve(connection, bridge.run, bridge.images)


def main() -> None:
    """Serve inside the sandbox. The argument is `FOLDER`, which has the kernels' files."""
    cell_protocol.leave_only(sys.argv[1], PACKAGES)
    serve(socket.socket(fileno=cell_protocol.CONNECTION), prepare())
