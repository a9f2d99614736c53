"""Fills the buffers of sockets of one kind until the kernel refuses; prints the reason."""

import socket
import sys
import time

held: list[socket.socket] = []
kind = sys.argv[1]
SEND_BUFFER, RECEIVE_BUFFER, ROUTE = 7, 8, bytes.fromhex("20000000 1a000503 00000000 00000000") + bytes(16)
server = socket.create_server(("127.0.0.1", 0))


def fill(one: socket.socket) -> None:
    one.setsockopt(socket.SOL_SOCKET, SEND_BUFFER, 4 << 20)
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(65536))
    except BlockingIOError:
        pass


try:
    while True:
        if kind == "unix":
            held += socket.socketpair()
            fill(held[-1])
        elif kind == "in flight":
            held += socket.socketpair()
            for _ in range(50):
                one, two = socket.socketpair()
                fill(one)
                socket.send_fds(held[-1], [b"x"], [one.fileno(), two.fileno()])
                one.close()
                two.close()
        elif kind == "tcp":
            held += [socket.create_connection(server.getsockname()), server.accept()[0]]
            fill(held[-1])
        elif kind == "udp":
            held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            held[-1].setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER, 4 << 20)
            held[-1].bind(("127.0.0.1", 0))
            for _ in range(200):
                held[0].sendto(bytes(60000), held[-1].getsockname())
        else:
            held.append(socket.socket(16, socket.SOCK_RAW, 0))
            held[-1].setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER, 4 << 20)
            for _ in range(2000):
                held[-1].send(ROUTE)
except OSError as error:
    print(error, len(held), flush=True)
time.sleep(20)
print("held")
