"""Tries to create sockets of every family, kind and protocol; prints those that should be refused but were not."""

import socket

NETLINK, VSOCK, ROUTE = 16, 40, 0
for family in range(64):
    if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        continue
    for kind in (1, 2, 3, 4, 5, 10):
        for make in (socket.socket, socket.socketpair):
            try:
                for one in pair if isinstance(pair := make(family, kind), tuple) else (pair,):
                    one.close()
                if (family, make) != (NETLINK, socket.socket):
                    print(family, kind, make.__name__)
            except OSError:
                pass
for family in (socket.AF_INET, socket.AF_INET6):
    for kind in (1, 2, 3, 5, 6):
        for protocol in (33, 115, 132, 136, 137, 255, 256, 262):
            try:
                socket.socket(family, kind, protocol).close()
                print(family, kind, protocol)
            except OSError:
                pass
for protocol in range(1, 32):
    try:
        socket.socket(NETLINK, socket.SOCK_RAW, protocol).close()
        print("netlink", protocol)
    except OSError:
        pass
try:
    peer = socket.socket(VSOCK, socket.SOCK_STREAM)
    peer.settimeout(3)
    peer.connect((2, 1024))
except OSError as error:
    print("" if error.errno in (1, 97) else error, end="")
