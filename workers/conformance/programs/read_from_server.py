"""Prints the answer of a server: family, address, port; `refused` if there is none."""

import socket
import sys

family, address = sys.argv[1:3]
peer = socket.socket(getattr(socket, family))
peer.settimeout(5)
try:
    peer.connect((address, int(sys.argv[3])) if family == "AF_INET" else address.replace("@", "\0"))
    print(peer.recv(100).decode(), end="")
except OSError:
    print("refused")
