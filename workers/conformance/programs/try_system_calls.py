"""Makes the system calls of a JSON object; prints the answer to each."""

import ctypes
import errno
import json
import os
import platform
import sys

libc = ctypes.CDLL(None, use_errno=True)
column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
me = os.getpid()
for name, (*numbers, arguments) in json.loads(sys.argv[1]).items():
    values = [ctypes.c_long(one) if isinstance(one, int) else one.encode() for one in arguments]
    answer = libc.syscall(numbers[column], *values)
    if name == "clone" and answer == 0:
        os._exit(0)
    print(name, "allowed" if answer >= 0 else errno.errorcode[ctypes.get_errno()], flush=True)
