"""Small images for tests, made from a few programs of this machine: as a folder, and in the formats of other tools."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PROGRAMS = ("bash", "cat", "chown", "grep", "ls", "mkdir", "rm", "sed", "setsid", "sleep", "touch")
BEGIN = '#!/bin/sh\necho "$0 $*" >/tmp/begun\nshift\nexec "$@"\n'
"""The entry program: it records its arguments, and runs all but the first."""
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ENTRYPOINT = ["/usr/bin/begin", "a b"]
CHECK = {"Test": ["CMD-SHELL", "test -e /opt"], "Interval": 2_000_000_000}
ENV = ("PATH=/usr/local/bin:/usr/bin:/bin:/opt/own/bin", "GREETING=hello from the image")


def root_folder(folder: Path, programs: Sequence[str] = PROGRAMS) -> Path:
    """Fill a root file system with a few programs, and the libraries that they and this Python need."""
    for name in ("usr/bin", "etc", "tmp", "var/tmp", "opt/data/deep"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    binaries = [str(Path(sys.executable).resolve())]
    for program in programs:
        path = shutil.which(program)
        assert path
        shutil.copy(path, folder / "usr/bin" / program)
        binaries.append(path)
    if "bash" in programs:
        (folder / "usr/bin/sh").symlink_to("bash")
    # the files that the farm's Python uses and any real image has
    for binary in binaries:
        _copy_libraries(binary, folder)
    (folder / "usr/bin/begin").write_text(BEGIN)
    (folder / "usr/bin/begin").chmod(0o755)
    (folder / "etc/mark").write_text("small image\n")
    (folder / "opt/data/deep/file").write_text("x")
    return folder


@cache
def _libraries(binary: str) -> list[str]:
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    return re.findall(r"(?:=> |\t)(/[^ ]*) \(", listed)


def _copy_libraries(binary: str, folder: Path) -> None:
    for library in _libraries(binary):
        if not Path(library).exists() or library.startswith(sys.base_prefix):
            continue
        target = folder / "usr" / library.removeprefix("/usr").lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)


def sif_file(apptainer: Path, root: Path | str, target: Path) -> Path:
    """Write an image file, little compressed: the default takes five times as long."""
    for options in (["--mksquashfs-args=-Xcompression-level 1"], []):
        words = [str(apptainer), "build", "--force", *options, str(target), str(root)]
        # older versions do not have the option
        done = subprocess.run(words, capture_output=True, check=not options)
        if not done.returncode:
            break
    target.chmod(0o644)
    return target


def docker_archive(root: Path, target: Path) -> Path:
    """Write an archive as `docker save` does: two layers, of which the second adds a file and removes a folder."""
    layers = [_layer_of(root), _second_layer()]
    config = _config(layers)
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    paths = [f"{hashlib.sha256(layer).hexdigest()}/layer.tar" for layer in layers]
    manifest = json.dumps([{"Config": name, "RepoTags": ["small:1"], "Layers": paths}]).encode()
    is_packed = target.suffix == ".gz"
    with tarfile.open(target, "w:gz", compresslevel=1) if is_packed else tarfile.open(target, "w") as archive:
        for path, data in [(name, config), *zip(paths, layers, strict=True), ("manifest.json", manifest)]:
            _add(archive, path, data)
    return target


def oci_archive(root: Path, target: Path, *, folders_listed: bool = True) -> Path:
    """Write the same as an OCI image layout; some tools leave out its folders."""
    manifest, blobs = oci_image(root)
    first = descriptor(MANIFEST, manifest)
    first["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    index = json.dumps({"schemaVersion": 2, "manifests": [first]}).encode()
    with tarfile.open(target, "w") as archive:
        for folder in ("blobs", "blobs/sha256") if folders_listed else ():
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(info)
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        for blob in (*blobs, manifest):
            _add(archive, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
        _add(archive, "index.json", index)
    return target


def oci_image(root: Path) -> tuple[bytes, list[bytes]]:
    """Return the same as in a registry: the manifest, and the blobs that it names."""
    layers = [_layer_of(root), _second_layer()]
    config = _config(layers)
    packed = [gzip.compress(layer, compresslevel=1, mtime=0) for layer in layers]
    fields = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": descriptor("application/vnd.oci.image.config.v1+json", config),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar+gzip", layer) for layer in packed],
    }
    return json.dumps(fields).encode(), [*packed, config]


def _config(layers: Sequence[bytes]) -> bytes:
    ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    fields = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ENV, "WorkingDir": "/opt/own", "Entrypoint": ENTRYPOINT, "User": "7:8", "Healthcheck": CHECK},
        "rootfs": {"type": "layers", "diff_ids": ids},
    }
    return json.dumps(fields).encode()


def descriptor(kind: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}


def _layer_of(root: Path) -> bytes:
    def as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        return info

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as layer:
        for path in sorted(root.iterdir()):
            layer.add(path, path.name, filter=as_root)
    return packed.getvalue()


def _second_layer() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as layer:
        _add(layer, "opt/own/added", b"by the second layer\n")
        _add(layer, "opt/.wh.data", b"")
    return packed.getvalue()


def _add(archive: tarfile.TarFile, path: str, data: bytes) -> None:
    info = tarfile.TarInfo(path)
    info.size, info.mode = len(data), 0o755
    archive.addfile(info, io.BytesIO(data))
