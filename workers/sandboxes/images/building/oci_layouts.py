"""OCI layouts: select one of several images, share blobs, remove paths that obstruct the runtime; and OCI configs.

The config of an image that was built elsewhere (image-spec, `config.md`) has its settings. The variables that it sets,
such as PATH, are read from the runtime when the image is built.

The runtime writes /etc/resolv.conf, /etc/hosts and /.singularity.d of an image that it builds, and follows links at
these paths, such as systemd's link to a file of /run. In a build's namespaces such a write fails. A cleared layout has
an additional layer that removes these paths.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import platform
import posixpath
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_pascal

from workers.config import SandboxConfig
from workers.sandboxes.images.building.builder import environment, runtime_words
from workers.sandboxes.images.dockerfile.image_config import Healthcheck, ImageConfig
from workers.sandboxes.images.runtime import own_folder
from workers.sandboxes.sandbox_user import give

_REMOVED = ("etc/.wh.resolv.conf", "etc/.wh.hosts", ".wh..singularity.d")
_NAME = "org.opencontainers.image.ref.name"
_OCI = "application/vnd.oci.image"
_LAYER = f"{_OCI}.layer.v1.tar"
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}

ReadFile = Callable[[str], bytes]
"""Returns the content of a file of a layout or an archive by its path there. Raises OSError, KeyError or ValueError."""

LAYOUT = "cache/blob"
"""The OCI layout in the runtime's cache folder."""
_BLOBS = f"{LAYOUT}/blobs/sha256"
_BLOB_NAME = re.compile(r"[0-9a-f]{64}")

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


def config_in_layout(read: ReadFile, tag: str = "") -> bytes:
    """Return the OCI config of an image of a layout, by tag if there are several.

    Raises ValueError, KeyError or OSError if the layout has no such image.
    """
    manifest = _manifest(read, json.loads(read("index.json")), tag)
    return read(_path_of(manifest["config"]))


def config_in_docker_archive(read: ReadFile, tag: str = "") -> bytes:
    """Return the same of an archive by `docker save`."""
    images = json.loads(read("manifest.json"))
    wanted = tag.strip(":")
    for image in images:
        names = image.get("RepoTags") or [""]
        if not wanted or any(wanted in (name, name.rpartition(":")[2]) for name in names):
            return read(image["Config"])
    raise ValueError(f"it has no image {wanted!r}")


def file_reader(layout: Path) -> ReadFile:
    """Return a function that reads files of a layout in a folder."""
    return lambda path: (layout / path).read_bytes()


def member_reader(archive: tarfile.TarFile) -> ReadFile:
    """Return a function that reads files of an archive."""
    members = {member.name.removeprefix("./"): member.name for member in archive}
    return lambda path: _member(archive, members[path]).read()


def clear(layout: Path, tag: str = "") -> str:
    """Keep one image in a layout, by tag if there are several, and add the layer; return its name for the runtime.

    Raises ValueError, KeyError or OSError if the layout has no such image.
    """
    manifest = _manifest(file_reader(layout), json.loads((layout / "index.json").read_text()), tag)
    config = json.loads(_blob(layout, manifest["config"]).read_bytes())
    layer = _add(layout, _LAYER, io.BytesIO(_whiteouts()))
    config["rootfs"]["diff_ids"].append(layer["digest"])
    if config.get("history"):
        config["history"].append({"created_by": "the paths that the container runtime writes, removed"})
    layers = [*map(_as_oci, manifest["layers"]), layer]
    _write_index(layout, [_manifest_of(layout, _add(layout, f"{_OCI}.config.v1+json", _json(config)), layers)])
    return f"oci:{layout}"


def layout_of_docker_archive(archive: Path, layout: Path) -> Path:
    """Convert an archive by `docker save` to an OCI layout and return it. Raises ValueError, KeyError or OSError."""
    (layout / "blobs/sha256").mkdir(parents=True)
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    manifests = []
    with tarfile.open(archive) as packed:
        for image in json.load(_member(packed, "manifest.json")):
            config = _add(layout, f"{_OCI}.config.v1+json", _member(packed, image["Config"]))
            layers = [_layer(layout, _member(packed, path)) for path in image["Layers"]]
            manifest = _manifest_of(layout, config, layers)
            manifests += [{**manifest, "annotations": {_NAME: tag}} for tag in image.get("RepoTags") or [""]]
    _write_index(layout, manifests)
    return layout


def _layer(layout: Path, content: IO[bytes]) -> dict[str, Any]:
    added = _add(layout, _LAYER, content)
    with _blob(layout, added).open("rb") as file:
        start = file.read(4)
    packing = "+gzip" if start.startswith(_GZIP) else "+zstd" if start == _ZSTD else ""
    return {**added, "mediaType": _LAYER + packing}


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    member = archive.extractfile(name)
    if member is None:
        raise ValueError(f"{name} of the archive is not a file")
    return member


def choose(layout: Path, tag: str) -> str:
    """Keep only the image of a tag in a layout; return its name for the runtime. Raises ValueError, KeyError."""
    _write_index(layout, [_chosen(json.loads((layout / "index.json").read_text()), tag)])
    return f"oci:{layout}"


def _chosen(index: Mapping[str, Any], tag: str) -> Mapping[str, Any]:
    """Return the descriptor of a tag's image; without a tag, that of this machine's platform, or the first."""
    manifests: Sequence[Mapping[str, Any]] = index["manifests"]
    names = [str(each.get("annotations", {}).get(_NAME, "")) for each in manifests]
    machine = _MACHINES.get(platform.machine(), platform.machine())
    own = [each for each in manifests if each.get("platform", {}).get("architecture") == machine]
    if not tag and manifests:
        return (own or manifests)[0]
    wanted = tag.strip(":")
    for name, each in zip(names, manifests, strict=True):
        if wanted in (name, name.rpartition(":")[2]):
            return each
    raise ValueError(f"it has no image {wanted!r}, but {', '.join(filter(None, names)) or 'none with a name'}")


def _manifest(read: ReadFile, index: Mapping[str, Any], tag: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(read(_path_of(_chosen(index, tag))))
    return _manifest(read, content, "") if "manifests" in content else content


def _as_oci(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the descriptor of a layer with OCI's media type, instead of Docker's as used in its registry."""
    kind = str(layer["mediaType"])
    packing = next((f"+{name}" for name in ("gzip", "zstd") if kind.endswith(name)), "")
    return {**layer, "mediaType": _LAYER + packing}


def _manifest_of(layout: Path, config: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kind = f"{_OCI}.manifest.v1+json"
    return _add(layout, kind, _json({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers}))


def _write_index(layout: Path, manifests: Sequence[Mapping[str, Any]]) -> None:
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))


def _add(layout: Path, kind: str, content: IO[bytes]) -> dict[str, Any]:
    new = layout / "blobs/sha256/new"
    with content, new.open("wb") as file:
        shutil.copyfileobj(content, file)
    with new.open("rb") as file:
        name = hashlib.file_digest(file, "sha256").hexdigest()
    return {"mediaType": kind, "digest": f"sha256:{name}", "size": new.rename(new.with_name(name)).stat().st_size}


def _blob(layout: Path, descriptor: Mapping[str, Any]) -> Path:
    return layout / _path_of(descriptor)


def _path_of(descriptor: Mapping[str, Any]) -> str:
    algorithm, _, name = str(descriptor["digest"]).partition(":")
    if algorithm != "sha256" or not name.isalnum():
        raise ValueError(f"the layout has an invalid digest {descriptor['digest']!r}")
    return f"blobs/{algorithm}/{name}"


def _json(value: Any) -> IO[bytes]:
    return io.BytesIO(json.dumps(value).encode())


def _whiteouts() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as layer:
        for name in _REMOVED:
            layer.addfile(tarfile.TarInfo(name))
    return packed.getvalue()


@contextmanager
def shared_blobs(config: SandboxConfig, work_folder: Path) -> Iterator[Path]:
    """Yield a cache folder for one build in a work folder: it has all blobs of the node, and gives it the new ones.

    Its layout lists only the image of this build. A layout of several images does not say which name has which image.
    """
    shared, folder = own_folder(config) / _BLOBS, work_folder / "blobs"
    own = folder / _BLOBS
    for each in (shared, own):
        each.mkdir(parents=True, exist_ok=True)
    _link_all(shared, own)
    give(folder, config.user)
    try:
        yield folder
    finally:
        # also of a build that failed, which is perhaps retried
        _link_all(own, shared)


def _link_all(source: Path, target: Path) -> None:
    for blob in source.iterdir():
        # another build may have added or removed it at the same time; unfinished ones have other names
        with suppress(OSError):
            if _BLOB_NAME.fullmatch(blob.name):
                os.link(blob, target / blob.name)


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
    settings = _OciImage.model_validate_json(text).config or _OciConfig()
    return ImageConfig(
        workdir=posixpath.normpath(posixpath.join("/", settings.working_dir)) if settings.working_dir else "",
        user=settings.user or "",
        shell=tuple(settings.shell or ImageConfig().shell),
        entrypoint=list(settings.entrypoint) if settings.entrypoint else None,
        command=list(settings.cmd) if settings.cmd else None,
        healthcheck=_check(settings.healthcheck),
        exposed=tuple(settings.exposed_ports or ()),
        volumes=tuple(settings.volumes or ()),
        labels=dict(settings.labels or {}),
        stop_signal=settings.stop_signal or "",
        onbuild=tuple(settings.on_build or ()),
    )


def _check(healthcheck: _OciHealthcheck | None) -> Healthcheck | None:
    kind, *words = (healthcheck and healthcheck.test) or ("NONE",)
    if healthcheck is None or kind == "NONE" or not words:
        return None
    default = Healthcheck("")
    return Healthcheck(
        words[0] if kind == "CMD-SHELL" else words,
        healthcheck.interval / _NS or default.interval_s,
        healthcheck.timeout / _NS or default.timeout_s,
        healthcheck.start_period / _NS,
        healthcheck.start_interval / _NS or default.start_interval_s,
        healthcheck.retries or default.retries,
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


def write_variables(config: SandboxConfig, root: Path, work_folder: Path, folder: Path) -> None:
    """Write the variables of an image in its work folder to `folder`; none if its scripts fail. Blocks."""
    words = runtime_words(config, "exec", "-s")
    command = [*words, *_OPTIONS, str(root), "bash", "--norc", "--noprofile", "-c", _PRINT]
    try:
        done = subprocess.run(
            command, env=environment(config, work_folder), stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S
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
