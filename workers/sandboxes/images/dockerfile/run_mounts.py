"""Mounts of RUN: `--mount=type=bind|cache|tmpfs|secret|ssh`, with BuildKit's options."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass

from workers.sandboxes.images.dockerfile.instructions import Instruction
from workers.sandboxes.images.dockerfile.variables import Expansion

_KINDS = ("bind", "cache", "tmpfs", "secret", "ssh")
_NAMES = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "rw": "readwrite"}
_FLAGS = {"readonly", "readwrite", "required"}
_KNOWN = {
    *("type", "from", "source", "target", "readonly", "readwrite", "id", "sharing", "required", "size", "mode"),
    *("uid", "gid", "env"),
}


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options of one mount: `origin` is the stage or image of a bind, empty for the context."""

    kind: str
    origin: str
    source: str
    target: str
    required: bool


def mounts_of(instruction: Instruction, expansion: Expansion) -> list[MountOptions]:
    """Return the mounts of a RUN. Raises ValueError for an invalid one."""
    return [_options(value, expansion) for name, value in instruction.flags if name == "mount"]


def origins_of(instruction: Instruction) -> list[str]:
    """Return the stages and images of a RUN's mounts as written; they must not contain variables."""
    fields = [_fields(value) for name, value in instruction.flags if name == "mount"]
    return [each["from"] for each in fields if each.get("from")]


def _fields(written: str) -> Mapping[str, str]:
    fields = {}
    for field in next(csv.reader([written]), []):
        name, equals, value = field.partition("=")
        name = _NAMES.get(name.lower(), name.lower())
        fields[name] = value if equals else "true" if name in _FLAGS else ""
    return fields


def _options(written: str, expansion: Expansion) -> MountOptions:
    fields = _fields(written)
    for name, value in fields.items():
        if name not in _KNOWN or not value:
            raise ValueError(f"--mount={written}: {name} is not an option of a mount, or has no value")
    values = {name: value if name == "from" else expansion.text(value) for name, value in fields.items()}
    kind = values.get("type", "bind").lower()
    if kind not in _KINDS:
        raise ValueError(f"--mount=type={kind} is not supported; there are {', '.join(_KINDS)}")
    target = values.get("target", "")
    if not target and kind in ("bind", "cache", "tmpfs"):
        raise ValueError(f"--mount={written}: it has no target")
    required = values.get("required", "").lower() in ("true", "1", "t")
    return MountOptions(kind, values.get("from", ""), values.get("source", ""), target, required)
