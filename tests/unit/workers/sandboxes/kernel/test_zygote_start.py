"""The program file of the process that becomes the policy's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.sandboxes.kernel.zygote_start import sealed_copy


def test_copy_cannot_be_changed(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"#!" + os.urandom(1000))
    copy = sealed_copy(str(program))
    try:
        assert os.pread(copy, 2000, 0) == program.read_bytes()
        again = os.open(f"/proc/self/fd/{copy}", os.O_RDWR)
        for change in (lambda: os.write(again, b"x"), lambda: os.truncate(again, 5), lambda: os.truncate(again, 5000)):
            with pytest.raises(PermissionError):
                change()
        os.close(again)
    finally:
        os.close(copy)
