"""Sends itself as many descriptors as it may, and holds them; with an argument, also takes pages of pipes."""

import fcntl
import os
import socket
import sys
import time
from contextlib import suppress

SET_PIPE_SIZE = 1031
null = os.open("/dev/null", os.O_RDONLY)
sockets: list[socket.socket] = []
pipes: list[int] = []
with suppress(OSError):
    while len(sockets) < 400:
        sockets += socket.socketpair()
        for _ in range(10):
            socket.send_fds(sockets[-1], [b"x"], [null] * 200)
with suppress(OSError):
    while len(sys.argv) > 1:
        pipes += os.pipe()
        fcntl.fcntl(pipes[-1], SET_PIPE_SIZE, 1 << 20)
print("taken", flush=True)
time.sleep(100)
