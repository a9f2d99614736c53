"""Uses files in a new folder as programs do: locks, maps, names a nameless file, opens a database."""

import fcntl
import mmap
import os
import socket
import sqlite3
import sys

os.mkdir(sys.argv[1])
os.chdir(sys.argv[1])
with open("locked", "w+b") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.lockf(file, fcntl.LOCK_EX)
    file.truncate(1 << 20)
    mapped = mmap.mmap(file.fileno(), 1 << 20)
    mapped[5:8] = b"abc"
    mapped.flush()
assert open("locked", "rb").read(8) == b"\0\0\0\0\0abc"
number = os.open(".", os.O_TMPFILE | os.O_RDWR)
os.write(number, b"named later")
# a folder makes Python use the call that follows the link
os.link(f"/proc/self/fd/{number}", "named", src_dir_fd=os.open(".", os.O_RDONLY))
assert open("named").read()
os.mkfifo("pipe")
server = socket.socket(socket.AF_UNIX)
server.bind("socket")
server.listen()
socket.socket(socket.AF_UNIX).connect("socket")
base = sqlite3.connect("base")
base.execute("pragma journal_mode=wal")
base.execute("create table t (x)")
base.execute("insert into t values (1)")
base.commit()
assert sqlite3.connect("base").execute("select x from t").fetchall() == [(1,)]
os.setxattr("named", "user.promise", b"x")
assert os.getxattr("named", "user.promise") == b"x"
print("fine")
