"""The configuration of an image that was built elsewhere, as its OCI config declares it (image-spec, `config.md`)."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_pascal

from workers.sandboxes.images.dockerfile.image_config import Healthcheck, ImageConfig

_FILE = "config.json"
_NS = 1e9


class _OciModel(BaseModel):
    """Tools write null, or nothing, for a value that is not set."""

    model_config = ConfigDict(alias_generator=to_pascal, extra="ignore", frozen=True)


class _OciHealthcheck(_OciModel):
    """Times in nanoseconds; 0 is Docker's default."""

    test: Sequence[str] | None = None
    interval: int = 0
    timeout: int = 0
    start_period: int = 0
    start_interval: int = 0
    retries: int = 0


class _OciConfig(_OciModel):
    user: str | None = None
    working_dir: str | None = None
    entrypoint: Sequence[str] | None = None
    cmd: Sequence[str] | None = None
    shell: Sequence[str] | None = None
    on_build: Sequence[str] | None = None
    healthcheck: _OciHealthcheck | None = None
    exposed_ports: Mapping[str, Any] | None = None
    volumes: Mapping[str, Any] | None = None
    labels: Mapping[str, str] | None = None
    stop_signal: str | None = None


class _OciImage(_OciModel):
    model_config = ConfigDict(alias_generator=None)

    config: _OciConfig | None = None


def parse_config(text: bytes | str) -> ImageConfig:
    """Return the settings in an OCI config, except variables, which the runtime reports. Raises ValueError."""
    found = _OciImage.model_validate_json(text).config or _OciConfig()
    return ImageConfig(
        workdir=posixpath.normpath(posixpath.join("/", found.working_dir)) if found.working_dir else "",
        user=found.user or "",
        shell=tuple(found.shell or ImageConfig().shell),
        entrypoint=list(found.entrypoint) if found.entrypoint else None,
        command=list(found.cmd) if found.cmd else None,
        healthcheck=_check(found.healthcheck),
        exposed=tuple(found.exposed_ports or ()),
        volumes=tuple(found.volumes or ()),
        labels=dict(found.labels or {}),
        stop_signal=found.stop_signal or "",
        onbuild=tuple(found.on_build or ()),
    )


def _check(found: _OciHealthcheck | None) -> Healthcheck | None:
    kind, *words = (found and found.test) or ("NONE",)
    if found is None or kind == "NONE" or not words:
        return None
    default = Healthcheck("")
    return Healthcheck(
        words[0] if kind == "CMD-SHELL" else words,
        found.interval / _NS or default.interval_s,
        found.timeout / _NS or default.timeout_s,
        found.start_period / _NS,
        found.start_interval / _NS or default.start_interval_s,
        found.retries or default.retries,
    )


def write_config(config: ImageConfig, folder: Path) -> None:
    """Write the configuration of an image to its folder in the cache."""
    (folder / _FILE).write_text(json.dumps(asdict(config)))


def read_config(folder: Path) -> ImageConfig:
    """Return the configuration that was written to a folder; an empty one if there is none."""
    try:
        return ImageConfig.of(json.loads((folder / _FILE).read_text()))
    except FileNotFoundError:
        return ImageConfig()
