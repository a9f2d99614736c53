"""Traces a child and reads its memory."""

import ctypes
import os
import signal

libc = ctypes.CDLL(None, use_errno=True)
TRACE_ME, CONTINUE, PEEK = 0, 7, 2
word = ctypes.c_long(4711)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
child = os.fork()
if child == 0:
    libc.ptrace(TRACE_ME, 0, None, None)
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(7)
os.waitpid(child, 0)
seen = libc.ptrace(PEEK, child, ctypes.addressof(word), None)
libc.ptrace(CONTINUE, child, None, None)
print("traced" if (seen, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) == (4711, 7) else seen)
