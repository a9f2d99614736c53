"""The cache and index of images: folders named by the content from which they were built, each built once.

An image is `KEY/root`. Next to it are `image.json`, the record of its build, `names` under which it was requested,
`used/NODE` with the time of a node's last use, and `lock`, which every sandbox that uses it holds. They appear together
by one rename, so the folder itself is the index and has no incomplete entries. A shared home is a shared cache.

FARM_IMAGE_CACHE is the rule for reuse, after the three modes of ProRL Agent. `scratch` rebuilds images that were not
built since this farm started, because of changes that a key does not show: a tag that has moved, packages that %post
fetches. `versioned` reuses an image of the same content and the same version of the runtime. `lock` records the image
of a reference at its first use, and uses it from then on, whatever happens to its source.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, Protocol

from farm.errors import ImageError, SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.images.building.builder import BUILD_S
from workers.sandboxes.images.content_store import PARTS, digest, made_once, use_mark, write
from workers.sandboxes.images.shared_lock import if_free, shared
from workers.sandboxes.remove_tree import remove

ROOT = "root"
REMEMBER_S = {False: 300.0, True: 2.0}
"""Seconds for which a failed build is not tried again, by whether its error is retryable."""

LAYERS = "layers.json"
"""The file that lists the folders of which an image consists, if it has no root file system of its own."""

_CARD = "image.json"
_LOCK = "lock"
_USED = "used"
_NAMES = "names"
_NOTE_S = 30.0

_noted: dict[tuple[Path, str], float] = {}

_MAX_LINKS = 40


class ImageSource(Protocol):
    """The source of an image: its name, the name of its content, and its build."""

    is_built: ClassVar[bool]
    """False for a source that costs nothing to assemble and is always used in its current state."""
    is_whole: ClassVar[bool]
    """True if it makes a whole root file system, and not a layer of an image or a list of layers."""

    @property
    def reference(self) -> str:
        """The name that users give it."""

    def key(self) -> str:
        """Return the name of its content. Raises ImageError if it is missing. Blocks."""

    def make(self, folder: Path) -> None:
        """Build the folder `root` in a folder. Raises ImageError. Blocks, possibly for minutes."""


@dataclass(frozen=True, slots=True)
class ImageMetadata:
    """The record of the build of an image in the cache."""

    key: str
    n_bytes: int
    built_at: float
    build_s: float
    mode: str
    node: str


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image in the cache: all names under which it was requested, and the time of each node's last use."""

    card: ImageMetadata
    folder: Path
    names: tuple[str, ...]
    used_at: dict[str, float]

    @property
    def last_used_at(self) -> float:
        return max(self.used_at.values(), default=self.card.built_at)


def cached(config: SandboxConfig, source: ImageSource, *, retry: bool = False, relock: bool = False) -> Path:
    """Return the image's root folder, built if missing. Blocks. ImageError, immediately after a recent failure.

    For manual requests: `retry` repeats failed builds, and `relock` locks to the current content.
    """
    requested_at = time.time()
    mode = config.image_cache if source.is_built else "versioned"
    pin = config.images_folder / "pins" / digest(source.reference)
    pinned = pin.read_text() if mode == "lock" and pin.exists() else ""
    if pinned and not relock and stands(config.images_folder / pinned):
        return _root(config, source, config.images_folder / pinned, retry)
    key = source.key()
    if pinned and not relock and key != pinned:
        raise ImageError(
            f"image {source.reference} is locked to {pinned}, which is not in the cache, and its source has changed: "
            "`farm images build` locks it again"
        )
    folder = config.images_folder / key
    _build(config, source, folder, requested_at, mode, retry)
    if mode == "lock" and pinned != key:
        pin.parent.mkdir(exist_ok=True)
        write(pin, key)
    return _root(config, source, folder, retry)


def _build(
    config: SandboxConfig, source: ImageSource, folder: Path, requested_at: float, mode: str, retry: bool
) -> None:
    """Build it, unless a good one exists. A failure is remembered and applies to all that wait for the same image."""
    good = partial(_stands_since, since=_started_at(config.started_at)) if mode == "scratch" else stands
    if good(folder):
        return
    forget_before = requested_at if retry else 0.0
    _fail_again(folder, requested_at, forget_before)

    def make(temporary: Path) -> None:
        _fail_again(folder, requested_at, forget_before)
        try:
            _make(source, temporary, folder.name, mode)
        except (ImageError, OSError) as error:
            failed = _as_image_error(error, source)
            # first, because the note may need the space
            remove(temporary)
            note = {"message": failed.message, "lines": failed.lines, "retryable": failed.retryable, "at": time.time()}
            with suppress(OSError):
                write(_failure(folder), json.dumps(note))
            raise failed from error
        _failure(folder).unlink(missing_ok=True)
        for name in (source.reference, ""):
            _noted.pop((folder, name), None)

    try:
        made_once(folder, make, good, private=True, within_s=BUILD_S)
    except OSError as error:
        raise _as_image_error(error, source) from error


def _as_image_error(error: ImageError | OSError, source: ImageSource) -> ImageError:
    """Return it as an ImageError. An OSError is retryable: a full disk or a missing file system may recover."""
    if isinstance(error, ImageError):
        return error
    return ImageError(f"image {source.reference} could not be built: {error}", retryable=True)


def _make(source: ImageSource, temporary: Path, key: str, mode: str) -> None:
    started = time.time()
    source.make(temporary)
    root = temporary / ROOT
    if source.is_built and source.is_whole and not has_bash(root):
        raise ImageError(f"image {source.reference} has no bash, which every sandbox needs")
    if source.key() != key:
        raise ImageError(f"image {source.reference} was changed while it was built", retryable=True)
    (temporary / _LOCK).touch()
    for name in (_USED, _NAMES):
        (temporary / name).mkdir()
    card = ImageMetadata(key, size_of(root), time.time(), time.time() - started, mode, os.uname().nodename)
    (temporary / _CARD).write_text(json.dumps(asdict(card)))


def stands(folder: Path) -> bool:
    """Return whether it is complete. Without its lock (e.g. a partial copy), it cannot be held and is rebuilt."""
    return (folder / _CARD).exists() and (folder / _LOCK).exists() and all(part.is_dir() for part in parts(folder))


def parts(folder: Path) -> list[Path]:
    """Return the other folders of which an image consists, the uppermost first; empty if it has its own files."""
    try:
        fields = json.loads((folder / LAYERS).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [Path(part) for part in (*fields["layers"], fields["folder"]) if Path(part).parent != folder]


def entry_of(config: SandboxConfig, key: str) -> Path:
    """Return the root folder of a cached image by its name, or the start of it. Raises ImageError."""
    keys = [entry.folder for entry in entries(config) if key and entry.folder.name.startswith(key)]
    if len(keys) != 1:
        several = ", which several images begin with" if keys else ""
        raise ImageError(f"there is no image {key!r} in the cache of this node{several}: see `farm images list`")
    if not stands(keys[0]):
        raise ImageError(f"image {key} is incomplete because layers of it were removed: build it again")
    _note_use(config, keys[0])
    return keys[0] / ROOT


def _note_use(config: SandboxConfig, folder: Path) -> None:
    now = time.monotonic()
    if now - _noted.get((folder, ""), -_NOTE_S) < _NOTE_S:
        return
    for each in (folder, *(part.parent for part in parts(folder) if part.parent.parent == config.images_folder)):
        with suppress(OSError):
            (each / _USED / os.uname().nodename).touch()
    _noted[folder, ""] = now


def _stands_since(folder: Path, since: float) -> bool:
    card = _card(folder)
    return card is not None and card.built_at >= since


@cache
def _started_at(known: float | None) -> float:
    """Return the start time of this farm, or if unknown of this process, in seconds since 1970."""
    if known is not None:
        return known
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _root(config: SandboxConfig, source: ImageSource, folder: Path, by_hand: bool) -> Path:
    """Return the root folder; record its use by this node and its name, for pruning, at intervals and if writable."""
    now = time.monotonic()
    seen = (folder, source.reference)
    if now - _noted.get(seen, -_NOTE_S) >= _NOTE_S:
        with suppress(OSError):
            name = folder / _NAMES / digest(source.reference)
            if not name.exists():
                write(name, source.reference)
            if not by_hand:
                _note_use(config, folder)
                _noted[seen] = now
    return folder / ROOT


@contextmanager
def held(config: SandboxConfig, root: Path) -> Iterator[int | None]:
    """Yield a descriptor. While any process has it open, the image is not removed. None for a folder not in the cache.

    Raises SandboxError if the image was removed since it was found.
    """
    if root.parent.parent == config.images_folder:
        lock, what = root.with_name(_LOCK), f"image {root.parent.name}"
    elif is_part(config, root):
        lock, what = use_mark(root), f"{root.parent.name}/{root.name}"
    else:
        yield None
        return
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(shared(lock))
        except FileNotFoundError:
            # a home that cannot be written has no marks, and nothing is removed from it
            if is_part(config, root) and root.is_dir() and not os.access(root.parent, os.W_OK):
                yield None
                return
            raise SandboxError(f"{what} has just been removed from the cache") from None
        yield descriptor


def is_part(config: SandboxConfig, folder: Path) -> bool:
    """Return whether a folder is an entry of the cache but not an image."""
    return folder.parent.name in PARTS and folder.parent.parent == config.cache


@contextmanager
def unheld(config: SandboxConfig, folder: Path) -> Iterator[bool]:
    """Yield whether no sandbox uses an image or part; if so, none can start to while the block runs.

    True where the file system has no locks: pruning then depends on the times only.
    """
    with if_free(use_mark(folder) if is_part(config, folder) else folder / _LOCK, without_locks=True) as free:
        yield free


def _failure(folder: Path) -> Path:
    return folder.with_name(folder.name + ".failed")


def _fail_again(folder: Path, requested_at: float, forget_before: float) -> None:
    """Raise the ImageError of a build that failed recently, or while this process waited for its turn."""
    try:
        note = json.loads(_failure(folder).read_text())
    except (FileNotFoundError, ValueError):
        return
    fresh = note["at"] >= requested_at or time.time() - note["at"] < REMEMBER_S[note["retryable"]]
    if fresh and note["at"] >= forget_before:
        raise ImageError(note["message"], note["lines"], retryable=note["retryable"])


def entries(config: SandboxConfig) -> Iterator[CachedImage]:
    """Yield all images in the cache, in no order."""
    for folder in config.images_folder.glob("*"):
        card = _card(folder)
        if card is not None and card.key == folder.name:
            used = {mark.name: mark.stat().st_mtime for mark in (folder / _USED).glob("*")}
            names = sorted(name.read_text() for name in (folder / _NAMES).glob("*") if not name.suffix)
            yield CachedImage(card, folder, tuple(names), used)


def cached_parts(config: SandboxConfig) -> Iterator[CachedImage]:
    """Yield the other entries of the cache in the form of images. The node that used them last is not known."""
    for kind in PARTS:
        for mark in (config.cache / kind).glob("*.use"):
            folder = mark.with_suffix("")
            with suppress(OSError):
                used_at = mark.stat().st_mtime
                card = ImageMetadata(f"{kind}/{folder.name}", _size_of(folder, mark, used_at), used_at, 0.0, "", "")
                if folder.is_dir():
                    yield CachedImage(card, folder, (), {"": used_at})


def _size_of(folder: Path, mark: Path, used_at: float) -> int:
    """Return the size of a part, which never changes and is measured once."""
    if text := mark.read_text():
        return int(text)
    n_bytes = size_of(folder)
    mark.write_text(str(n_bytes))
    os.utime(mark, (used_at, used_at))
    return n_bytes


def locked_keys(config: SandboxConfig) -> set[str]:
    """Return the images that are locked by FARM_IMAGE_CACHE=lock, because they could not be built again."""
    return {pin.read_text() for pin in (config.images_folder / "pins").glob("*")}


def _card(folder: Path) -> ImageMetadata | None:
    try:
        return ImageMetadata(**json.loads((folder / _CARD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def size_of(folder: Path) -> int:
    """Return the disk space of a tree in bytes; hard links count once."""
    counted: set[tuple[int, int]] = set()
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = Path(parent, name).lstat()
            if status.st_nlink == 1 or (status.st_dev, status.st_ino) not in counted:
                counted.add((status.st_dev, status.st_ino))
                total += status.st_blocks * 512
    return total


def has_bash(root: Path) -> bool:
    """Return whether a root file system has a bash in a usual folder, with links resolved as inside."""
    return any(_inside(root, Path(folder, "bash")) for folder in ("bin", "usr/bin", "usr/local/bin"))


def _inside(root: Path, path: Path, n_links: int = 0) -> bool:
    current = root
    parts = list(path.parts)
    while parts:
        part = parts.pop(0)
        current = current.parent if part == ".." and current != root else current / part if part != ".." else root
        if current.is_symlink():
            target = current.readlink()
            base = Path() if target.is_absolute() else current.parent.relative_to(root)
            rest = Path(*target.parts[1:]) if target.is_absolute() else target
            return n_links < _MAX_LINKS and _inside(root, Path(base, rest, *parts), n_links + 1)
    return current.is_file()
