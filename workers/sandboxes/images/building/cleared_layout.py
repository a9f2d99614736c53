"""An OCI layout of an image in which nothing stands in the way of the files that the container runtime writes.

The runtime writes /etc/resolv.conf, /etc/hosts and /.singularity.d of an image that it builds, and follows a link that
the image has there, such as the one of systemd to a file of /run. In the namespaces of a build such a write fails. The
layout gets one more layer, which removes these paths.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_REMOVED = ("etc/.wh.resolv.conf", "etc/.wh.hosts", ".wh..singularity.d")
_NAME = "org.opencontainers.image.ref.name"
_OCI = "application/vnd.oci.image"
_LAYER = f"{_OCI}.layer.v1.tar"
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def clear(layout: Path, tag: str = "") -> str:
    """Leave one image in a layout, by its tag if it has several, with the layer; return its name for the runtime.

    Raises ValueError, KeyError or OSError if the layout has no such image.
    """
    manifest = _manifest(layout, json.loads((layout / "index.json").read_text()), tag)
    config = json.loads(_blob(layout, manifest["config"]).read_bytes())
    layer = _add(layout, _LAYER, io.BytesIO(_whiteouts()))
    config["rootfs"]["diff_ids"].append(layer["digest"])
    if config.get("history"):
        config["history"].append({"created_by": "the paths that the container runtime writes, removed"})
    manifest["config"] = _add(layout, f"{_OCI}.config.v1+json", _json(config))
    layers = [_as_oci(each) for each in manifest["layers"]]
    _write(layout, manifest["config"], [*layers, layer])
    return f"oci:{layout}"


def layout_of_docker_archive(archive: Path, layout: Path, tag: str = "") -> None:
    """Write the image of an archive by `docker save` as an OCI layout. Raises ValueError, KeyError or OSError."""
    (layout / "blobs/sha256").mkdir(parents=True)
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    with tarfile.open(archive) as packed:
        images = json.load(_member(packed, "manifest.json"))
        image = next((each for each in images if not tag or tag.strip(":") in (each.get("RepoTags") or ())), None)
        if image is None:
            raise ValueError(f"the archive has no image {tag.strip(':')}")
        config = _add(layout, f"{_OCI}.config.v1+json", _member(packed, image["Config"]))
        layers = []
        for path in image["Layers"]:
            added = _add(layout, _LAYER, _member(packed, path))
            with _blob(layout, added).open("rb") as file:
                start = file.read(4)
            packing = "+gzip" if start.startswith(_GZIP) else "+zstd" if start == _ZSTD else ""
            layers.append({**added, "mediaType": _LAYER + packing})
    _write(layout, config, layers)


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    member = archive.extractfile(name)
    if member is None:
        raise ValueError(f"{name} of the archive is no file")
    return member


def _manifest(layout: Path, index: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """Return the manifest of the image that a tag names, of this machine where there is one for each of several."""
    found: Sequence[Mapping[str, Any]] = index["manifests"]
    named = [each for each in found if each.get("annotations", {}).get(_NAME) == tag.strip(":")]
    machine = _MACHINES.get(platform.machine(), platform.machine())
    own = [each for each in found if each.get("platform", {}).get("architecture") == machine]
    if not (chosen := named or own or found):
        raise ValueError("the layout has no image")
    content: dict[str, Any] = json.loads(_blob(layout, chosen[0]).read_bytes())
    return _manifest(layout, content, "") if "manifests" in content else content


def _as_oci(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the descriptor of a layer by OCI's name of its kind, which is Docker's in images of its registry."""
    kind = str(layer["mediaType"])
    packing = next((f"+{name}" for name in ("gzip", "zstd") if kind.endswith(name)), "")
    return {**layer, "mediaType": _LAYER + packing}


def _write(layout: Path, config: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> None:
    kind = f"{_OCI}.manifest.v1+json"
    fields = {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers}
    manifest = _add(layout, kind, _json(fields))
    index = {"schemaVersion": 2, "manifests": [manifest]}
    (layout / "index.json").write_text(json.dumps(index))


def _add(layout: Path, kind: str, content: IO[bytes]) -> dict[str, Any]:
    """Copy a blob into a layout, and return its descriptor."""
    found = layout / "blobs/sha256/new"
    with content, found.open("wb") as file:
        shutil.copyfileobj(content, file)
    with found.open("rb") as file:
        name = hashlib.file_digest(file, "sha256").hexdigest()
    return {"mediaType": kind, "digest": f"sha256:{name}", "size": found.rename(found.with_name(name)).stat().st_size}


def _blob(layout: Path, descriptor: Mapping[str, Any]) -> Path:
    algorithm, _, name = str(descriptor["digest"]).partition(":")
    if algorithm != "sha256" or not name.isalnum():
        raise ValueError(f"the layout names a blob by {descriptor['digest']!r}")
    return layout / "blobs" / algorithm / name


def _json(value: Any) -> IO[bytes]:
    return io.BytesIO(json.dumps(value).encode())


def _whiteouts() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as layer:
        for name in _REMOVED:
            layer.addfile(tarfile.TarInfo(name))
    return packed.getvalue()
