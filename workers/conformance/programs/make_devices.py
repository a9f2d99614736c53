"""Tries to create device files; prints those that could be created."""

import os
import stat

for kind, number in ((stat.S_IFBLK, (7, 0)), (stat.S_IFBLK, (8, 0)), (stat.S_IFCHR, (1, 1)), (stat.S_IFCHR, (1, 11))):
    try:
        os.mknod("device", 0o600 | kind, os.makedev(*number))
        print(number)
    except PermissionError:
        pass
