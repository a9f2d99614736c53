"""Sources of images (folder, file, registry, definition, the host). Each knows the name of its content."""

from __future__ import annotations

import gzip
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from farm.errors import ImageError
from workers.config import SandboxConfig
from workers.sandboxes.images import definitions
from workers.sandboxes.images.archives import BROKEN, BadArchive, extract, first_line
from workers.sandboxes.images.building.builder import LinkInTheWay, build, copy_tree, lend, move_tree, owner, workplace
from workers.sandboxes.images.building.oci_layouts import (
    LAYOUT,
    choose,
    clear,
    config_in_docker_archive,
    config_in_layout,
    file_reader,
    layout_of_docker_archive,
    member_reader,
    parse_config,
    shared_blobs,
    write_config,
    write_variables,
)
from workers.sandboxes.images.building.sif_file import oci_settings, restore_special_modes
from workers.sandboxes.images.content_store import digest, fingerprint, open_to_all
from workers.sandboxes.images.definitions import Definition, split_tag
from workers.sandboxes.images.image_cache import ROOT, ImageSource
from workers.sandboxes.images.runtime import version
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.sandbox_user import give, sandbox_user

REGISTRIES = tuple(f"{name}://" for name in definitions.OF_REGISTRIES)
ARCHIVES = ("docker-archive", "oci-archive")
_MARKER_FILES = ("manifest.json", "oci-layout")
"""The file that marks each of ARCHIVES. Recent Docker writes archives with both, which are then read as the first."""
TARS = (".tar", ".tar.gz", ".tgz")
PACKED = (".gz", ".tgz")
DEFINITIONS = (".def", ".def" + definitions.TEMPLATE)
KINDS = (
    "`host`, a folder, a .sif, docker-archive:FILE, oci-archive:FILE, a .tar of the two, docker://NAME, or a "
    "definition, FILE.def or FILE.def.j2"
)

# the version of the way images are built here; a new number rebuilds all
_FORMAT = 3

HOST = "host"


def source_of(config: SandboxConfig, name: str, values: Mapping[str, str]) -> ImageSource:
    """Return the source that an image's name refers to, existing or not. ImageError if it does not take `values`."""
    if values and not name.endswith(definitions.TEMPLATE):
        raise ImageError(f"image {name} takes no image_values: only a template, FILE.def{definitions.TEMPLATE}, does")
    if name.startswith(REGISTRIES):
        return RegistrySource(config, name)
    kind, _, rest = name.partition(":")
    if kind in ARCHIVES and rest:
        path, tag = split_tag(Path(rest.removeprefix("//")).absolute())
        return ArchiveSource(config, kind, path, tag)
    path = Path(name).absolute()
    if name.endswith(DEFINITIONS):
        return DefinitionSource(config, path, dict(values))
    if name.endswith(".sif"):
        return RuntimeFileSource(config, path)
    if name.endswith(TARS):
        return ArchiveSource(config, "", path)
    return FolderSource(config, path)


def _content(path: Path, digests: Path, *, follow: bool = False) -> str:
    """Return a path's fingerprint. Raises ImageError if it cannot be read."""
    try:
        return fingerprint(path, digests, follow=follow)
    except FileNotFoundError:
        remedy = f"fix its name, put it there, or name another: {KINDS}"
        raise ImageError(f"there is no {path} on this node: {remedy}") from None
    except OSError as error:
        raise ImageError(f"{path}, from which an image is built, cannot be read: {error}") from error


def _build(
    config: SandboxConfig,
    words: Sequence[str],
    work_folder: Path,
    source: ImageSource,
    folder: Path,
    *,
    definition: bool = False,
    blobs: Path | None = None,
) -> None:
    what = f"image {source.reference}"
    root = build(config, words, work_folder, what, definition=definition, blobs=blobs)
    write_variables(config, root, work_folder, folder)
    move_tree(root, folder / ROOT)


def _write_config(find: Callable[[], bytes], source: ImageSource, folder: Path) -> None:
    try:
        write_config(parse_config(find()), folder)
    except (OSError, ValueError, KeyError) as error:
        raise ImageError(f"the configuration of image {source.reference} is invalid: {first_line(error)}") from error


@dataclass(frozen=True, slots=True)
class _Source:
    config: SandboxConfig
    is_built: ClassVar[bool] = True
    is_whole: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class _PathSource(_Source):
    path: Path

    @property
    def reference(self) -> str:
        return str(self.path)


class FolderSource(_PathSource):
    """A root file system that does not belong to the sandbox user, so it is copied to one that does."""

    @property
    def usable(self) -> bool:
        """True if sandboxes can use it in place: an overlay cannot change files of a user that is unknown inside."""
        tops = [path for path in (self.path, self.path / "usr") if path.exists()]
        return self.path.is_dir() and all(path.lstat().st_uid == owner(self.config.user) for path in tops)

    def key(self) -> str:
        if not self.path.exists() and self.path.parent == Path.cwd():
            # such as ubuntu:24.04, which in other tools is an image of a registry
            name = self.path.name
            remedy = (
                f"docker://{name} is one of a registry, `farm images alias {name} IMAGE` makes it stand for another"
            )
            raise ImageError(f"there is no image {name} on this node: {remedy}; an image is {KINDS}")
        return digest("folder", _FORMAT, _content(self.path, self.config.digests_folder), owner(self.config.user))

    def make(self, folder: Path) -> None:
        copy_tree(self.path, folder / ROOT)
        give(folder / ROOT, self.config.user)


class RuntimeFileSource(_PathSource):
    """A file of the runtime's own format, unpacked: if mounted, each sandbox would have its own page cache."""

    def key(self) -> str:
        # its content is fixed: every version of the runtime unpacks it the same way
        return digest("file", _FORMAT, _content(self.path, self.config.digests_folder), owner(self.config.user))

    def make(self, folder: Path) -> None:
        with workplace(self.config) as work_folder:
            source = lend(self.path, work_folder, "image.sif", self.config.user)
            if not _is_sif(source):
                # the builder would interpret it as a definition
                raise ImageError(f"image {self.path} is not a SIF file or is broken")
            _build(self.config, [str(source)], work_folder, self, folder)
            restore_special_modes(self.config, source, folder / ROOT, work_folder)
            if settings := oci_settings(source):
                _write_config(lambda: b'{"config": %s}' % settings, self, folder)


def _is_sif(path: Path) -> bool:
    """Return whether SIF's magic follows the 32 bytes that make it executable (github.com/apptainer/sif, `sif.go`)."""
    with path.open("rb") as file:
        return file.read(41)[32:] == b"SIF_MAGIC"


@dataclass(frozen=True, slots=True)
class ArchiveSource(_Source):
    """A tar file written by `docker save` or `skopeo copy`; `kind` is empty if it must be detected."""

    kind: str
    path: Path
    tag: str = ""

    @property
    def reference(self) -> str:
        return f"{self.kind}:{self.path}{self.tag}" if self.kind else str(self.path)

    def key(self) -> str:
        content = _content(self.path, self.config.digests_folder)
        return digest("archive", _FORMAT, content, self.kind, self.tag, version(self.config), owner(self.config.user))

    def make(self, folder: Path) -> None:
        kind, complete = self._look()
        try:
            with workplace(self.config) as work_folder:
                _build(self.config, [self._source(kind, complete, work_folder)], work_folder, self, folder)
        except LinkInTheWay as error:
            with workplace(self.config) as work_folder:
                _build(self.config, [self._cleared(kind, work_folder, error)], work_folder, self, folder)
        with tarfile.open(self.path) as archive:
            find = config_in_layout if kind == "oci-archive" else config_in_docker_archive
            _write_config(partial(find, member_reader(archive), self.tag), self, folder)

    def _source(self, kind: str, complete: bool, work_folder: Path) -> str:
        """Return the name of the image for the runtime, which does not support tags of archives."""
        if complete and not self.tag:
            return f"{kind}:{self._lent(work_folder)}"
        try:
            return choose(self._layout(kind, work_folder), self.tag)
        except (OSError, ValueError, KeyError) as failure:
            raise ImageError(f"image {self.reference} is not in its archive: {failure}") from failure

    def _cleared(self, kind: str, work_folder: Path, error: LinkInTheWay) -> str:
        """Return the name of a layout of the image without the links that obstruct the runtime."""
        try:
            return clear(self._layout(kind, work_folder), self.tag)
        except (OSError, ValueError, KeyError) as failure:
            raise ImageError(f"{error.message}; also without its links: {failure!r}", error.lines) from failure

    def _layout(self, kind: str, work_folder: Path) -> Path:
        return (
            self._unpacked(work_folder)
            if kind == "oci-archive"
            else layout_of_docker_archive(self.path, work_folder / "oci")
        )

    def _lent(self, work_folder: Path) -> Path:
        """Return a path by which the builder can read the archive; decompressed, because it cannot read all formats."""
        if self.path.suffix not in PACKED:
            return lend(self.path, work_folder, "image.tar", self.config.user)
        with gzip.open(self.path) as packed, (work_folder / "image.tar").open("wb") as archive:
            shutil.copyfileobj(packed, archive)
        return work_folder / "image.tar"

    def _look(self) -> tuple[str, bool]:
        """Return its kind, and whether the runtime can read it: it needs an OCI archive that lists all folders."""
        try:
            with tarfile.open(self.path) as archive:
                members = {member.name.removeprefix("./").rstrip("/"): member.isdir() for member in archive}
        except BROKEN as error:
            raise ImageError(f"image {self.reference} is not a tar file or is broken: {first_line(error)}") from error
        detected = next((kind for kind, name in zip(ARCHIVES, _MARKER_FILES, strict=True) if name in members), "")
        if not (self.kind or detected):
            raise ImageError(f"image {self.reference} is neither an archive of `docker save` nor an OCI archive")
        kind = self.kind or detected
        return kind, kind != "oci-archive" or members.get("blobs/sha256", False)

    def _unpacked(self, work_folder: Path) -> Path:
        folder = work_folder / "oci"
        folder.mkdir()
        try:
            extract(self.path, folder)
        except BadArchive as error:
            raise ImageError(f"image {self.reference} cannot be unpacked: {error}") from error
        return folder


@dataclass(frozen=True, slots=True)
class RegistrySource(_Source):
    """An image of a registry. Its name identifies its content: the registry is contacted only to build it."""

    reference: str

    def key(self) -> str:
        return digest("registry", _FORMAT, self.reference, version(self.config), owner(self.config.user))

    def make(self, folder: Path) -> None:
        try:
            with workplace(self.config) as work_folder:
                self._make(work_folder, folder)
        except ImageError as error:
            name = self.reference.removeprefix("docker://")
            advice = (
                "where the registry cannot be reached, name a .sif or an archive of it instead, or use "
                f"`farm images alias {name} IMAGE` to define it here"
            )
            raise ImageError(f"{error.message}; {advice}", error.lines, retryable=error.retryable) from error

    def _make(self, work_folder: Path, folder: Path) -> None:
        """Build the image in a work folder, again without its links if they obstruct the runtime."""
        with shared_blobs(self.config, work_folder) as blobs:
            layout = blobs / LAYOUT
            try:
                _build(self.config, [self.reference], work_folder, self, folder, blobs=blobs)
            except LinkInTheWay:
                remove(work_folder / "root")
                _build(self.config, [clear(layout)], work_folder, self, folder)
            # other kinds of registries have no such layout
            if (layout / "index.json").is_file():
                _write_config(partial(config_in_layout, file_reader(layout)), self, folder)


@dataclass(frozen=True, slots=True)
class DefinitionSource(_Source):
    """A definition file, or a template of one with its values."""

    path: Path
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in sorted(self.values.items()))
        return f"{self.path} ({shown})" if shown else str(self.path)

    def key(self) -> str:
        definition = definitions.read(self.path, self.values)
        contents = [_content(path, self.config.digests_folder, follow=True) for path in definition.sources()]
        return digest("definition", _FORMAT, definition.text, contents, version(self.config), owner(self.config.user))

    def make(self, folder: Path) -> None:
        definition = definitions.read(self.path, self.values)
        with (
            workplace(self.config) as work_folder,
            shared_blobs(self.config, work_folder) if definition.from_registry else nullcontext() as blobs,
        ):
            written = work_folder / "definition"
            written.write_text(self._lent(definition, work_folder))
            _build(self.config, [str(written)], work_folder, self, folder, definition=True, blobs=blobs)

    def _lent(self, definition: Definition, work_folder: Path) -> str:
        return definition.lent(lambda path, name, owned: lend(path, work_folder, name, self.config.user, owned=owned))


_HOST_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_HOST_EMPTY = (
    *("dev", "proc", "sys", "root", "run", "home", "mnt", "opt", "srv", "media"),
    *("tmp", "var/tmp", "var/log", "workspace"),
)
_HOST_OPEN = ("tmp", "var/tmp")
# files that programs below /usr look up, without anything that identifies this machine or its users; without
# certificates, because there is no network
_HOST_ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "os-release"),
    *("debian_version", "login.defs", "skel", "mime.types", "services", "protocols", "terminfo", "magic"),
    *("python3", "python3.11", "perl", "ssl/openssl.cnf"),
)
_HOST_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class HostSource(_Source):
    """The image `host`: the node's own system folders, read-only, with an /etc that reveals nothing about the node."""

    reference: ClassVar[str] = HOST
    is_built: ClassVar[bool] = False

    def key(self) -> str:
        copied = [Path("/etc", name) for name in _HOST_ETC]
        stamps = [(str(path), path.stat().st_mtime_ns) for path in copied if path.exists()]
        return digest("host", host_binds(), stamps, _HOST_FILES, _HOST_EMPTY, sandbox_user(self.config.user))

    def make(self, folder: Path) -> None:
        root = folder / ROOT
        root.mkdir()
        _make_host_root(root)
        open_to_all(root)
        give(root, self.config.user)


def host_binds() -> tuple[tuple[str, str], ...]:
    """Return the node's folders that are bound over it, as pairs of source and target."""
    folders = (Path("/", name) for name in _HOST_FOLDERS)
    return tuple((str(each), str(each)) for each in folders if each.is_dir() and not each.is_symlink())


def _make_host_root(folder: Path) -> None:
    for name in _HOST_FOLDERS:
        own = Path("/", name)
        if own.is_symlink():
            (folder / name).symlink_to(own.readlink())
        elif own.is_dir():
            (folder / name).mkdir()
    for name in _HOST_EMPTY:
        (folder / name).mkdir(parents=True)
    for name in _HOST_OPEN:
        (folder / name).chmod(0o1777)
    etc = folder / "etc"
    etc.mkdir()
    for name in _HOST_ETC:
        _copy_if_present(Path("/etc") / name, etc / name)
    for name, text in _HOST_FILES.items():
        (etc / name).write_text(text)


def _copy_if_present(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    elif source.exists():
        shutil.copy2(source, target, follow_symlinks=False)
