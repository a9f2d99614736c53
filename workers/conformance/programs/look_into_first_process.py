"""Tries to limit, trace and read process 1; prints what succeeds."""

import ctypes
import os
import resource

try:
    resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))
    print("limits")
except OSError:
    pass
libc = ctypes.CDLL(None, use_errno=True)
ATTACH, SEIZE, EXIT_KILL = 16, 0x4206, 0x100000
for name, request, option in (("attach", ATTACH, 0), ("seize", SEIZE, EXIT_KILL), ("seize", SEIZE, 0)):
    if libc.ptrace(request, 1, 0, ctypes.c_void_p(option)) == 0:
        print(name)
for name, flags in (("mem", os.O_RDONLY), ("mem", os.O_WRONLY), ("environ", 0), ("maps", 0), ("io", 0), ("syscall", 0)):
    try:
        descriptor = os.open(f"/proc/1/{name}", flags)
        print(name, os.read(descriptor, 1))
    except OSError:
        pass
for name in ("fd/0", "fd/1", "cwd", "root", "exe", "ns/net"):
    try:
        print(name, os.readlink(f"/proc/1/{name}"))
    except OSError:
        pass
