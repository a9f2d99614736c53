"""Which system calls a sandbox's processes are kept from, by a seccomp filter; standard library only.

The kernel's keyrings know no user namespace of the caller's session: what the worker has in its own, such as a Kerberos
ticket, could be read inside. With pidfd_getfd a program could take the descriptors by which the farm drives the shell
that started it. And a rootless sandbox has one user, so that changes of owner could only fail, which installers take
for an error; with `fake_root` they succeed, and change nothing, as Charliecloud does it (`ch-run --seccomp`): nothing
is preloaded, and it works for static programs too.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from workers.sandboxes.linux import prctl

# linux/seccomp.h, linux/audit.h, linux/bpf_common.h
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ARCH_AT, _NUMBER_AT = 4, 0
_X32 = 0x40000000
"""From here on, numbers on x86-64 are those of a third set of the same calls, which programs have stopped using."""

# add_key, request_key, keyctl, pidfd_getfd; chown, fchown, lchown, fchownat, where there are such; and the first four
# as 32-bit programs of the same machine know them
_CALLS = {
    "x86_64": (0xC000003E, (248, 249, 250, 438), (92, 93, 94, 260), (286, 287, 288, 438)),
    "aarch64": (0xC00000B7, (217, 218, 219, 438), (55, 54), (309, 310, 311, 438)),
}


def filter_calls(fake_root: bool) -> None:
    """For this process and what it starts; needs `no_new_privileges`. Raises OSError."""
    machine = platform.machine()
    arch, refused, owners, refused_to_32_bits = _CALLS[machine]
    lines: list[tuple[int, int, str, str]] = [
        (_LOAD, _ARCH_AT, "", ""),
        (_EQUAL, arch, "", "other"),
        (_LOAD, _NUMBER_AT, "", ""),
        *([(_AT_LEAST, _X32, "missing", "")] if machine == "x86_64" else []),
        *((_EQUAL, call, "missing", "") for call in refused),
        *((_EQUAL, call, "done", "") for call in (owners if fake_root else ())),
        (_RETURN, _ALLOW, "", ""),
    ]
    labels = {"other": len(lines)}
    lines += [(_LOAD, _NUMBER_AT, "", ""), *((_EQUAL, call, "missing", "") for call in refused_to_32_bits)]
    lines += [(_RETURN, _ALLOW, "", ""), (_RETURN, _ERRNO | errno.ENOSYS, "", ""), (_RETURN, _ERRNO, "", "")]
    labels |= {"missing": len(lines) - 2, "done": len(lines) - 1}
    code = b"".join(
        struct.pack("HBBI", kind, *(labels[name] - at - 1 if name else 0 for name in jumps), value)
        for at, (kind, value, *jumps) in enumerate(lines)
    )
    program = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program))
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, header)
