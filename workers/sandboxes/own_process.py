"""What a process settles with Linux about itself: who may look into it, whose orphans it adopts, its rights.

Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import struct

_PR_SET_DUMPABLE, _PR_CAPBSET_READ, _PR_SET_CHILD_SUBREAPER = 4, 23, 36
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def let_others_look_in(allowed: bool) -> None:
    """Whether processes of the same user may trace this one, copy its descriptors and open what it runs."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(allowed), 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """What its children leave behind becomes its own children, and not those of the first process of the host."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def keep_bounded_capabilities() -> None:
    """Give up at once the rights that otherwise only an exec would take: those that are not in the bounding set."""
    bounded = 0
    for number in range(64):
        held = _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)
        if held < 0:
            # the kernel knows fewer
            break
        bounded |= held << number
    low, high = bounded & 0xFFFFFFFF, bounded >> 32
    # linux/capability.h: effective, permitted and inheritable, of the lower and the upper half
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, 0, high, high, 0))
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    _check(_libc.capset(header, data), "capset")
