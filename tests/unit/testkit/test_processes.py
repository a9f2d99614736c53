"""Memory of a process is measured as the kernel counts it."""

from __future__ import annotations

import os

from testkit.processes import forget_peak, peak_mb


def test_peak_memory_is_measured_since_its_reset() -> None:
    me = os.getpid()
    forget_peak(me)
    before = peak_mb(me)
    block = bytearray(os.urandom(1) * 60_000_000)
    assert peak_mb(me) > before + 40
    del block
    forget_peak(me)
    assert peak_mb(me) < before + 40
