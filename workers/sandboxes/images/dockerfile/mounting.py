"""Files that RUN mounts: copied to the writable layer of a step while its program runs, and removed afterwards.

So no kernel mount is needed: files hidden by a mount are deleted only in the layer, and reappear with the removal.
"""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Sequence
from pathlib import Path

from workers.sandboxes.images.dockerfile.build_place import BuildPlace
from workers.sandboxes.images.dockerfile.context import copy_files
from workers.sandboxes.images.dockerfile.copying import OpenStage
from workers.sandboxes.images.dockerfile.instructions import Instruction
from workers.sandboxes.images.dockerfile.steps import FromContext, FromStage, RunMount
from workers.sandboxes.remove_tree import remove

# the target of links, because the layer has its files there
_REAL = (
    'if [ -d "$1" ]; then cd -P -- "$1"; echo "folder:$PWD"; else cd -P -- "${1%/*}/"; echo "file:$PWD/${1##*/}"; fi'
)
# folders such as /run contain real mounts, which cannot be deleted and stay
_CLEAR = 'shopt -s nullglob dotglob; for each in "$1"/*; do rm -rf -- "$each" 2>/dev/null; done; :'
_DELETE = 'if [ -e "$1" ] || [ -L "$1" ]; then rm -f -- "$1"; fi'
_OPEN_TO_ALL = 0o1777


def mount(place: BuildPlace, mounts: Sequence[RunMount], instruction: Instruction, open_stage: OpenStage) -> list[str]:
    """Create all files; return the paths that are not part of the layer, for `unmount`. ImageError. Blocks."""
    mounted = []
    for each in mounts:
        make_folder(place, posixpath.dirname(each.target), 0o755)
        kind, _, real = _output_of(place, _REAL, each.target, instruction).partition(":")
        real = posixpath.normpath("/" + real)
        if each.kept:
            make_folder(place, real, 0o755)
            continue
        mounted.append(real)
        other = open_stage(each.source) if isinstance(each.source, FromStage) else None
        is_folder = each.source is None or _is_folder(each.source, other)
        if kind == "folder" and is_folder:
            _output_of(place, _CLEAR, real, instruction)
        elif kind == "folder":
            raise instruction.refused(f"--mount: {each.target} is a folder, and its source is a file")
        else:
            _output_of(place, _DELETE, real, instruction)
        if each.source is None:
            make_folder(place, real, _OPEN_TO_ALL)
        elif isinstance(each.source, FromContext):
            with tempfile.TemporaryDirectory() as name:
                copy_files(each.source.files, Path(name, "staged"))
                place.upload(Path(name, "staged"), real)
        elif other is not None:
            place.copy_from(other, each.source.path, real)
    return mounted


def unmount(layer: Path, paths: Sequence[str], lower: Sequence[str]) -> None:
    """Remove mounted files from a finished layer over others, and folders that were created for them. Blocks."""
    for path in reversed(paths):
        parts = path.strip("/").split("/")
        above = [layer.joinpath(*parts[:n]) for n in range(1, len(parts))]
        # a link that the program created can lead anywhere
        if any(folder.is_symlink() or not folder.is_dir() for folder in above):
            continue
        remove(layer.joinpath(*parts))
        for n in range(len(parts) - 1, 0, -1):
            folder = layer.joinpath(*parts[:n])
            if any(Path(each, *parts[:n]).exists() for each in lower) or any(folder.iterdir()):
                break
            folder.rmdir()


def make_folder(place: BuildPlace, path: str, mode: int) -> None:
    """Create a folder unless it exists."""
    if place.is_folder(path):
        return
    place.make_folder(path, mode)


def _is_folder(source: FromContext | FromStage, other: BuildPlace | None) -> bool:
    if isinstance(source, FromContext):
        return source.files[0].path.is_dir()
    return other is not None and other.is_folder(source.path)


def _output_of(place: BuildPlace, script: str, path: str, instruction: Instruction) -> str:
    done = place.run(["bash", "-c", script, "bash", path])
    if done.code:
        raise instruction.refused(f"--mount at {path}: {done.output.strip()[-200:]}")
    return done.output.strip()
