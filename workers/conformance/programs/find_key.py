"""Searches for a kernel key by its name, with the given system call numbers; prints where it is found."""

import ctypes
import sys

SESSION = -3
keyctl, search, request_key = map(int, sys.argv[2:])
libc, name = ctypes.CDLL(None), sys.argv[1].encode()
try:
    with open("/proc/keys") as file:
        listed = file.read()
except OSError:
    listed = ""
print(
    "found:",
    *["by search"] * (libc.syscall(keyctl, search, SESSION, b"user", name, 0) >= 0),
    *["by request"] * (libc.syscall(request_key, b"user", name, 0, 0) >= 0),
    *["in /proc/keys"] * (sys.argv[1] in listed),
)
