"""Layers with the files that a policy left in its sandbox: kept on the node until they are evaluated, and packed, so
that any node can restore them later.

A packed layer is a zstandard frame with the tar stream of `workers/sandboxes/isolation/layer_files.py`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from farm.errors import SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.lifecycle import layers
from workers.sandboxes.processes.fork_client import fork_client
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.sandbox_user import sandbox_user

PACK_S = 600.0
"""Time limit for packing or unpacking one layer."""
_UNPACKED = 16
"""Maximum size of an unpacked layer, as a multiple of the maximum size of a packed one."""
_LEVEL = 3
_CHUNK = 1 << 20


class LayerTooLarge(SandboxError):
    """A policy left more bytes than its sandbox may hold, by file sizes, or more files than a layer may have."""


def files_of(config: SandboxConfig, name: str) -> Path:
    return config.layers_folder / name / "files"


def packed(config: SandboxConfig, name: str, max_bytes: int) -> tuple[bytes, int] | None:
    """Return a layer of this node packed, and the size of the stream; None if that would exceed `max_bytes`.

    Blocks. Raises SandboxError if the layer cannot be read.
    """
    ours, theirs = socket.socketpair()
    with _job(config, "pack", files_of(config, name), theirs, max_bytes * _UNPACKED) as refused:
        data, n_bytes = _compressed(ours, max_bytes)
        if n_bytes > max_bytes * _UNPACKED or len(data) > max_bytes:
            return None
        reason = refused()
    if reason:
        if reason.startswith("LayerRefused"):
            return None
        raise SandboxError(f"layer {name} cannot be packed: {reason}")
    return data, n_bytes


def _compressed(source: socket.socket, max_bytes: int) -> tuple[bytes, int]:
    """Return a stream compressed, up to the first chunk beyond `max_bytes`, and the number of bytes read."""
    compressor, packed, n_bytes = zstandard.ZstdCompressor(level=_LEVEL).compressobj(), bytearray(), 0
    with source, source.makefile("rb", 0) as stream:
        while len(packed) <= max_bytes and (chunk := stream.read(_CHUNK)):
            n_bytes += len(chunk)
            packed += compressor.compress(chunk)
    packed += compressor.flush()
    return bytes(packed), n_bytes


def unpack(config: SandboxConfig, name: str, data: bytes, max_bytes: int) -> None:
    """Make a packed layer a layer of this node, unless it exists already. Blocks. Raises SandboxError if it fails."""
    if layers.exists(config, name):
        return
    try:
        ours, theirs = socket.socketpair()
        with (
            _new_layer(config, name) as files,
            _job(config, "unpack", files, theirs, max_bytes * _UNPACKED) as refused,
            ours,
        ):
            # the other side reports why it stopped reading
            with contextlib.suppress(BrokenPipeError, ConnectionResetError), ours.makefile("wb", 0) as stream:
                for chunk in zstandard.ZstdDecompressor().read_to_iter(data):
                    stream.write(chunk)
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_WR)
            if reason := refused():
                raise SandboxError(f"layer {name} cannot be unpacked: {reason}")
    except zstandard.ZstdError as error:
        raise SandboxError(f"layer {name} cannot be unpacked: {error}") from error


@contextlib.contextmanager
def _new_layer(config: SandboxConfig, name: str) -> Iterator[Path]:
    """Yield the folder for the files of a new layer, which appears if the block ends without an error."""
    new = layers.begin(config)
    try:
        yield new / "files"
    except BaseException:
        remove(new)
        raise
    layers.publish(new, name)


def clean(config: SandboxConfig, files: Path) -> None:
    """Remove from a sandbox's written files those that no layer keeps: see `layer_files.clean`.

    Blocks. Raises SandboxError.
    """
    if reason := _done(config, "clean", files, {})[0]:
        raise SandboxError(f"the files of a sandbox cannot be kept as a layer: {reason}")


def copy(config: SandboxConfig, files: Path, name: str, max_bytes: int) -> None:
    """Make a layer of this node from a copy of the files that another sandbox has written. Blocks.

    Raises LayerTooLarge, or another SandboxError.
    """
    one, other = socket.socketpair()
    with (
        _new_layer(config, name) as copied,
        _job(config, "pack", files, one, max_bytes) as packing,
        _job(config, "unpack", copied, other, max_bytes) as unpacking,
    ):
        if reason := packing() or unpacking():
            error_type = LayerTooLarge if reason.startswith("LayerRefused") else SandboxError
            raise error_type(f"the files of a sandbox cannot be copied: {reason}")


def restore(config: SandboxConfig, name: str, rule: Mapping[str, object], lower: Sequence[str]) -> dict[str, Any]:
    """Remove from a layer above `lower` the files that a rule of `layer_files.restore` names; return its result.

    Blocks. Raises SandboxError.
    """
    reason, report = _done(config, "restore", files_of(config, name), rule, lower)
    if reason:
        raise SandboxError(f"layer {name} cannot be restored: {reason}")
    return report


def settle_owners(config: SandboxConfig, files: Path, owner: Sequence[int], lower: Sequence[str]) -> None:
    """Record the owners of a layer's files: see `file_owners.settle`. Blocks. Raises SandboxError."""
    if reason := _done(config, "settle", files, {"owner": list(owner)}, lower)[0]:
        raise SandboxError(f"the owners of a layer cannot be recorded: {reason}")


def _done(
    config: SandboxConfig, action: str, folder: Path, rule: Mapping[str, object], lower: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    ours, theirs = socket.socketpair()
    report: dict[str, Any] = {}
    with _job(config, action, folder, theirs, 0, report, lower) as refused:
        with ours, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            ours.sendall(json.dumps(rule).encode())
            ours.shutdown(socket.SHUT_WR)
        return refused(), report


@contextlib.contextmanager
def _job(
    config: SandboxConfig,
    action: str,
    folder: Path,
    theirs: socket.socket,
    max_bytes: int,
    report: dict[str, Any] | None = None,
    lower: Sequence[str] = (),
) -> Iterator[Callable[[], str]]:
    """Request an action from the fork server while the block moves the bytes; yields a function that waits for its end.

    The function returns why the action was refused, and puts the result into `report`. The job ends with the block at
    the latest.
    """
    job = {
        "do": "layer",
        "action": action,
        "folder": str(folder),
        "user": sandbox_user(config.user),
        "max_bytes": max_bytes,
        "lower": list(lower),
    }
    with theirs:
        answers = fork_client().request(job, [theirs.fileno()])
    # closing the replies kills a child that hangs, and with it the block's stream ends
    timer = threading.Timer(PACK_S, answers.close)
    timer.daemon = True
    timer.start()

    def refused() -> str:
        try:
            message, _ = answers.wait(PACK_S) or ({"error": "no answer"}, [])
        except (OSError, ValueError):
            return f"it took longer than {PACK_S:g} s"
        if report is not None:
            report.update(message.get("done") or {})
        return "" if "done" in message else str(message.get("refused") or message.get("error") or "it was killed")

    try:
        yield refused
    finally:
        timer.cancel()
        answers.close()
