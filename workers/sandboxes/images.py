"""The lowest layer of a sandbox: a folder with a root file system, from whatever a `SandboxSpec.image` names."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from farm.errors import SandboxError
from farm.settings import settings
from workers.sandboxes.content import digest, made_once
from workers.sandboxes.owner import give, sandbox_user
from workers.sandboxes.runtime import unpack

HOST = "host"
UNPACKED = (".sif", ".tar")

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_EMPTY = (
    "dev",
    "proc",
    "sys",
    "root",
    "run",
    "home",
    "mnt",
    "opt",
    "srv",
    "media",
    "tmp",
    "var/tmp",
    "var/log",
    "workspace",
)
_OPEN = ("tmp", "var/tmp")
# what programs under /usr look up, and nothing that tells of this machine or its people; no certificates, as there is
# no network
_COPIED = (
    *(
        "alternatives",
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "localtime",
        "timezone",
        "os-release",
        "debian_version",
    ),
    *("mime.types", "services", "protocols", "terminfo", "magic", "python3", "python3.11", "perl", "ssl/openssl.cnf"),
)
_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


@dataclass(frozen=True, slots=True)
class Image:
    """A root file system, and what of the host is bound over it, read-only: pairs of source and target."""

    folder: Path
    binds: tuple[tuple[str, str], ...] = ()
    system: bool = False
    """Whether its /usr is the host's, and with it the host's Python and libraries."""


def image(name: str) -> Image:
    """Find or make an image on this node. Raises SandboxError. Blocks; the first time for seconds."""
    if name == HOST:
        return _host()
    path = Path(name)
    if path.suffix in UNPACKED and path.is_file():
        return Image(_unpacked(path))
    if not (path / "usr").is_dir():
        raise SandboxError(f"image {name}: no folder with a root file system, and no {' or '.join(UNPACKED)} file")
    return Image(path.absolute())


def _unpacked(path: Path) -> Path:
    status = path.stat()
    name = digest("unpacked", str(path.absolute()), status.st_size, status.st_mtime_ns, sandbox_user())

    def make(folder: Path) -> None:
        unpack(path.absolute(), folder)
        give(folder)

    return made_once(settings().cache / "images" / name, make)


def _host() -> Image:
    binds = [(f"/{name}", f"/{name}") for name in _SYSTEM if _is_real_folder(Path("/", name))]
    copied = [Path("/etc", name) for name in _COPIED]
    stamps = [(str(path), path.stat().st_mtime_ns) for path in copied if path.exists()]
    name = digest("host", binds, stamps, _WRITTEN, _EMPTY, sandbox_user())
    return Image(made_once(settings().cache / "images" / name, _make_host), tuple(binds), system=True)


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _make_host(folder: Path) -> None:
    for name in _SYSTEM:
        own = Path("/", name)
        if own.is_symlink():
            (folder / name).symlink_to(own.readlink())
        elif own.is_dir():
            (folder / name).mkdir()
    for name in _EMPTY:
        (folder / name).mkdir(parents=True)
    for name in _OPEN:
        (folder / name).chmod(0o1777)
    etc = folder / "etc"
    etc.mkdir()
    for name in _COPIED:
        _copy(Path("/etc") / name, etc / name)
    for name, text in _WRITTEN.items():
        (etc / name).write_text(text)
    give(folder)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    elif source.exists():
        shutil.copy2(source, target, follow_symlinks=False)
