"""Names of base images, such as `ubuntu:24.04`, and the images that they stand for: a table in the farm's home."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from farm.errors import ImageError
from farm.settings import settings

_OWN_REGISTRY = ("docker.io/library/", "index.docker.io/library/", "library/", "docker.io/")


def _table() -> Path:
    return settings().home.absolute() / "image_aliases.json"


def aliases() -> dict[str, str]:
    """Return the image of each name, in the form of a SandboxSpec. Raises ImageError if the table is broken."""
    try:
        return dict(json.loads(_table().read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ImageError(f"{_table()}, the names of base images, cannot be read: {error}") from error


def set_alias(name: str, reference: str) -> None:
    """Let a name stand for an image from now on."""
    _write({**aliases(), plain_name(name): reference})


def remove_alias(name: str) -> bool:
    """Remove a name; return whether it existed."""
    table = aliases()
    there = table.pop(plain_name(name), None) is not None
    _write(table)
    return there


def alias_of(name: str) -> str | None:
    """Return the image that a name stands for; None if it is not in the table. A digest after `@` precedes the tag."""
    table = aliases()
    return next((table[each] for each in (plain_name(name), plain_name(name.partition("@")[0])) if each in table), None)


def plain_name(name: str) -> str:
    """Return a name without the default registry, and with the default tag if it has none."""
    name = name.removeprefix("docker://")
    for prefix in _OWN_REGISTRY:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if ":" in name.rpartition("/")[2] or "@" in name:
        return name
    return f"{name}:latest"


def _write(table: Mapping[str, str]) -> None:
    path = _table()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{uuid4().hex[:8]}")
    new.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
    new.replace(path)
