"""Data in TCP connections inside a sandbox, which the kernel counts together with that of the whole node."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farm.records.request import SandboxLimits
from workers.conformance.trial import program
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.isolation.kernel_memory import most_tcp

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

ROOMY = SandboxLimits(memory_mb=4096)
ECHO = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
def serve():
    one = server.accept()[0]
    while data := one.recv(1 << 16):
        pass
threading.Thread(target=serve, daemon=True).start()
one = socket.create_connection(server.getsockname())
for _ in range(3000):
    one.sendall(bytes(1 << 16))
print("sent")
"""


def test_sandbox_has_a_small_share_of_the_tcp_memory_of_its_node(start: Start, run: Run) -> None:
    pages = int(Path("/proc/sys/net/ipv4/tcp_mem").read_text().split()[1])
    assert most_tcp() <= max(16 << 20, pages * 4096 // 16)
    sandbox = start(limits=ROOMY)
    began = time.monotonic()
    result = run(sandbox.exec(["python3", "-c", program("fill_sockets"), "tcp"], timeout_s=60))
    assert "TCP memory limit of" in result.limit, result
    assert time.monotonic() - began < 20.0, "it is ended while it fills them or soon after, not when it ends itself"
    assert run(sandbox.exec(["echo", "on"], timeout_s=10)).stdout == b"on\n"


def test_received_data_is_not_limited(start: Start, run: Run) -> None:
    sandbox = start(limits=ROOMY)
    result = run(sandbox.exec(["python3", "-c", ECHO], timeout_s=60))
    assert (result.stdout, result.limit) == (b"sent\n", ""), "200 MB in all, little of it at a time"
