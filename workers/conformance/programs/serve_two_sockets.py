"""Serves a TCP port, which it prints, and an abstract Unix socket, whose name is the argument."""

import select
import socket
import sys

tcp = socket.create_server(("127.0.0.1", 0))
unix = socket.socket(socket.AF_UNIX)
unix.bind(f"\0{sys.argv[1]}")
unix.listen()
print(tcp.getsockname()[1], flush=True)
while True:
    for server in select.select([tcp, unix], [], [])[0]:
        peer, _ = server.accept()
        peer.sendall(b"reached")
        peer.close()
