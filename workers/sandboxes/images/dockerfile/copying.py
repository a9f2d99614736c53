"""COPY and ADD: files of the context, of heredocs and of other stages, into a stage."""

from __future__ import annotations

import posixpath
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from farm.errors import ImageError
from workers.sandboxes.images.dockerfile.build_place import BuildPlace
from workers.sandboxes.images.dockerfile.context import ContextFile, copy_files, digest_of
from workers.sandboxes.images.dockerfile.instructions import Instruction
from workers.sandboxes.images.dockerfile.steps import CopyFiles, FromContext, FromStage, FromText

# names are separated by bytes that none can have; only what the pattern's own wildcards match is split
_NAMED = (
    'IFS=; shopt -s nullglob; for each in $1; do [ -e "$each" ] || [ -L "$each" ] && printf \'%s\\0\' "$each"; done'
)
_INSIDE = 'shopt -s nullglob dotglob; for each in "$1"/*; do printf \'%s\\0\' "$each"; done'

OpenStage = Callable[[FromStage], BuildPlace]


def copy_into(place: BuildPlace, work: CopyFiles, instruction: Instruction, open_stage: OpenStage) -> None:
    """CopyFiles all sources. ImageError for one that is missing, or has changed since the build was planned. Blocks."""
    into = work.into or _is_folder(place, work.target)
    with tempfile.TemporaryDirectory() as name:
        for number, source in enumerate(work.sources):
            staged = Path(name, str(number))
            if isinstance(source, FromText):
                staged.write_text(source.text)
                staged.chmod(0o644 if work.mode is None else work.mode)
                _place(place, staged, source.name, work.target, into)
            elif isinstance(source, FromContext):
                copy_files(source.files, staged, work.mode)
                if work.mode is None and digest_of([_moved(file, staged) for file in source.files]) != source.digest:
                    raise ImageError(f"{source.name} was changed while it was copied", retryable=True)
                if work.unpack and staged.is_file() and tarfile.is_tarfile(staged):
                    place.unpack(staged, work.target)
                else:
                    _place(place, staged, posixpath.basename(source.name), work.target, into)
            else:
                _copy_stage(place, open_stage(source), source, work, instruction, into)


def _moved(file: ContextFile, staged: Path) -> ContextFile:
    path = staged / file.relative if file.relative else staged
    return ContextFile(file.relative, path, path.lstat().st_mode)


def _place(place: BuildPlace, staged: Path, name: str, target: str, into: bool) -> None:
    """CopyFiles a file to its target or into it, of a folder what is in it."""
    place.upload(staged, posixpath.join(target, name) if into and not staged.is_dir() else target)


def _copy_stage(
    place: BuildPlace, other: BuildPlace, source: FromStage, work: CopyFiles, instruction: Instruction, into: bool
) -> None:
    names = _names(other, _NAMED, source.path.rstrip("/") or "/")
    if not names:
        raise instruction.refused(f"there is no {source.path} in what it copies from")
    copied = []
    for name in names:
        inside = _names(other, _INSIDE, name) if work.mode is not None else []
        if _is_folder(other, name):
            place.copy_from(other, name, work.target)
            copied += [posixpath.join(work.target, posixpath.basename(each)) for each in inside]
        else:
            target = posixpath.join(work.target, posixpath.basename(name)) if into else work.target
            place.copy_from(other, name, target)
            copied.append(target)
    if work.mode is not None and copied:
        done = place.run(["chmod", "-R", f"{work.mode:o}", "--", *copied])
        if done.code:
            raise instruction.refused(f"--chmod: {done.output.strip()[-200:]}")


def _is_folder(place: BuildPlace, path: str) -> bool:
    return place.run(["bash", "-c", '[ -d "$1" ]', "bash", path]).code == 0


def _names(place: BuildPlace, script: str, argument: str) -> list[str]:
    output = place.run(["bash", "-c", script, "bash", argument]).output
    return [name for name in output.split("\0") if name]
