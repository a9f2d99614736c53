"""The back ends of `Sandbox.open_kernel`, for tests of their common behaviour."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from collections.abc import Coroutine
from typing import Any

from workers.plugins.interfaces import CellResult, Kernel

BACK_ENDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ipython": ("", ()),
    "jupyter": ("python3", ("ipykernel==7.4.0",)),
}
"""The name for opening a kernel, and the packages that a sandbox needs for it."""
OF_A_START = "ipykernel.kernelapp, debugpy.server.api, IPython.core.completerlib, IPython.extensions.storemagic"
"""Modules of ipykernel's packages that cover the imports of a kernel's start."""


def png(width: int, height: int, n_bytes: int = 0) -> bytes:
    """Return a picture, with `n_bytes` of data in it that no viewer shows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    header = struct.pack("!IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\x7f" * width) * height)
    parts = (chunk(b"IHDR", header), chunk(b"heAp", bytes(n_bytes)), chunk(b"IDAT", rows), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def showing(picture: bytes, times: int = 1) -> str:
    """Return a cell that shows a picture."""
    encoded = base64.b64encode(picture).decode()
    return (
        f"import base64; from IPython.display import Image, display\n"
        f"for _ in range({times}): display(Image(base64.b64decode({encoded!r})))"
    )


async def together(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    return list(await asyncio.gather(*coroutines))


async def cancelled_after(coroutine: Coroutine[Any, Any, Any], seconds: float) -> None:
    """Run it for a moment, then cancel it, as a rollout's cancel does."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


def own_value(kernel: Kernel, number: int) -> Coroutine[Any, Any, CellResult]:
    async def work() -> CellResult:
        await kernel.run(f"x = {number}", 60)
        return await kernel.run("print(x)", 60)

    return work()
