"""Creates System V objects that outlive it; prints their size in MB."""

import ctypes

libc = ctypes.CDLL(None)
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
libc.shmdt.argtypes = (ctypes.c_void_p,)
SIZE, NEW, NOT_WAITING = 20 << 20, 0o1600, 0o4000
n_memory = n_semaphores = n_messages = 0
while n_memory < 100 and (number := libc.shmget(0, ctypes.c_size_t(SIZE), NEW)) >= 0:
    address = libc.shmat(number, None, 0)
    ctypes.memset(address, 1, SIZE)
    libc.shmdt(address)
    n_memory += 1
while n_semaphores < 200 and libc.semget(0, 32000, NEW) >= 0:
    n_semaphores += 1
message = ctypes.create_string_buffer(b"\1" * 8200)
while n_messages < 20000 and (number := libc.msgget(0, NEW)) >= 0:
    while libc.msgsnd(number, message, 8000, NOT_WAITING) == 0:
        n_messages += 1
print(n_memory * SIZE + n_semaphores * 32000 * 64 + n_messages * 8000 >> 20)
