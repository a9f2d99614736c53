"""The OCI config of an image that was built elsewhere (image-spec, `config.md`), and the variables that it sets.

Variables, such as PATH, are read from the runtime when the image is built.
"""

from __future__ import annotations

import json
import logging
import posixpath
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_pascal

from workers.sandboxes.images.building.builder import environment, runtime_words
from workers.sandboxes.images.dockerfile.image_config import Healthcheck, ImageConfig

_FILE = "config.json"
_NS = 1e9

log = logging.getLogger(__name__)

_ASK_S = 60.0
_VARIABLES_FILE = "variables.json"
_OPTIONS = (
    *("--containall", "--cleanenv", "--no-home", "--no-mount", "sys,tmp,home,cwd,bind-paths", "--no-init"),
    *("--net", "--network", "none"),
)
# without `env`, which an image may lack; only variables passed to bash, not those that bash adds
_PRINT = "while IFS= read -r -d '' each; do printf '%s\\0' \"$each\"; done </proc/self/environ"
_OF_THE_RUNTIME = ("APPTAINER_", "SINGULARITY_")
_OF_THE_SANDBOX = {"HOME", "PWD", "OLDPWD", "SHLVL", "TERM", "USER", "LOGNAME", "PS1", "PROMPT_COMMAND", "_"}
_LIBRARIES = "/.singularity.d/libs"


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


def write_variables(root: Path, place: Path, folder: Path) -> None:
    """Write the variables of an image in its work folder to `folder`; none if its scripts fail. Blocks."""
    command = [*runtime_words("exec", "-s"), *_OPTIONS, str(root), "bash", "--norc", "--noprofile", "-c", _PRINT]
    try:
        done = subprocess.run(
            command, env=environment(place), stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S
        )
        complaint = done.stderr.decode(errors="replace").strip()[-300:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        complaint = f"no answer within {_ASK_S:.0f} s"
    if complaint:
        log.warning("Image %s: environment variables are unknown: %s", root, complaint)
        return
    text = done.stdout.decode(errors="replace")
    pairs = dict(pair.partition("=")[::2] for pair in text.split("\0") if "=" in pair)
    (folder / _VARIABLES_FILE).write_text(json.dumps(_own(pairs)))


def read_variables(folder: Path) -> dict[str, str]:
    """Return the variables that were written to a folder; empty if there are none."""
    try:
        return dict(json.loads((folder / _VARIABLES_FILE).read_text()))
    except FileNotFoundError:
        return {}


def _own(pairs: dict[str, str]) -> dict[str, str]:
    """Return the image's variables, without those of the runtime and the caller."""
    own = {
        name: value
        for name, value in pairs.items()
        if not name.startswith(_OF_THE_RUNTIME) and name not in _OF_THE_SANDBOX
    }
    libraries = [path for path in own.pop("LD_LIBRARY_PATH", "").split(":") if path not in {"", _LIBRARIES}]
    if libraries:
        own["LD_LIBRARY_PATH"] = ":".join(libraries)
    if own.get("LANG") == "C":
        # the runtime sets it if the image does not
        del own["LANG"]
    return own
