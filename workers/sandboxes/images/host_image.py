"""The image `host`: the node's own system folders, read-only, with an /etc that reveals nothing about the node."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

from workers.sandboxes.images.content_store import digest, open_to_all
from workers.sandboxes.images.image_cache import ROOT
from workers.sandboxes.sandbox_user import give, sandbox_user

REFERENCE = "host"

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
# files that programs below /usr look up, without anything that identifies this machine or its users; without
# certificates, because there is no network
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
    *(
        "login.defs",
        "skel",
        "mime.types",
        "services",
        "protocols",
        "terminfo",
        "magic",
        "python3",
        "python3.11",
        "perl",
        "ssl/openssl.cnf",
    ),
)
_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class HostSource:
    """See `workers.sandboxes.images.image_cache.ImageSource`."""

    reference: str = REFERENCE
    is_built: ClassVar[bool] = False
    is_whole: ClassVar[bool] = True

    def key(self) -> str:
        copied = [Path("/etc", name) for name in _COPIED]
        stamps = [(str(path), path.stat().st_mtime_ns) for path in copied if path.exists()]
        return digest("host", binds(), stamps, _WRITTEN, _EMPTY, sandbox_user())

    def make(self, folder: Path) -> None:
        root = folder / ROOT
        root.mkdir()
        _make(root)
        open_to_all(root)
        give(root)


def binds() -> tuple[tuple[str, str], ...]:
    """Return the node's folders that are bound over it, as pairs of source and target."""
    return tuple((f"/{name}", f"/{name}") for name in _SYSTEM if _is_real_folder(Path("/", name)))


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _make(folder: Path) -> None:
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


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    elif source.exists():
        shutil.copy2(source, target, follow_symlinks=False)
