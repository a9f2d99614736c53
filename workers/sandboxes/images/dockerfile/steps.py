"""Steps of a build: the change of each to a stage's files, and the name of its layer by content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from workers.sandboxes.images.content_store import digest
from workers.sandboxes.images.dockerfile.context import ContextFile, FileMode
from workers.sandboxes.images.dockerfile.instructions import Instruction
from workers.sandboxes.images.layered_image import Image

# the version of the way layers are created; a new number rebuilds all
_FORMAT = 3
_LABEL_CHARS = 60


@dataclass(frozen=True, slots=True)
class FromContext:
    """A source of COPY in the build context; `digest` is that of its files."""

    name: str
    files: tuple[ContextFile, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class FromText:
    """A source of COPY that is a heredoc."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FromStage:
    """A source of COPY in an earlier stage, by its number, or in another image."""

    path: str
    stage: int | Image
    key: str


@dataclass(frozen=True, slots=True)
class FromAddress:
    """A source of ADD that is downloaded, and its name in a folder; `checksum` is empty if any content is accepted."""

    address: str
    name: str
    checksum: str


Source: TypeAlias = FromContext | FromText | FromStage | FromAddress


@dataclass(frozen=True, slots=True)
class RunMount:
    """Files mounted at an absolute path for a program, hiding existing ones, that are in no layer.

    Without `source` it is an empty folder. `kept` is for a folder that is created if it is missing, and stays.
    """

    target: str
    source: FromContext | FromStage | None = None
    kept: bool = False


@dataclass(frozen=True, slots=True)
class RunProgram:
    """A program to run: complete environment, user as written, absolute working directory."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    user: str
    workdir: str
    stdin: str = ""
    mounts: tuple[RunMount, ...] = ()


@dataclass(frozen=True, slots=True)
class CopyFiles:
    """Files to copy to an absolute path. `into`: the path is a folder that they go into; `unpack`: tars are unpacked.

    For files of a stage, `excluded` are patterns of paths below each source, and `parents` keeps their path. For files
    of the context, both are applied in the plan.
    """

    sources: tuple[Source, ...]
    target: str
    into: bool
    chown: str = ""
    mode: FileMode | None = None
    unpack: bool = False
    excluded: tuple[str, ...] = ()
    parents: bool = False


@dataclass(frozen=True, slots=True)
class MakeFolder:
    """A working directory that must exist and belong to a user."""

    path: str
    user: str


@dataclass(frozen=True, slots=True)
class BuildStep:
    """The step of one instruction. `key` names its layer by all inputs, including the layers below it."""

    instruction: Instruction
    work: RunProgram | CopyFiles | MakeFolder
    key: str = field(compare=False)

    @property
    def label(self) -> str:
        """Its instruction on one short line."""
        text = " ".join(self.instruction.text.split())
        short = text if len(text) <= _LABEL_CHARS else text[: _LABEL_CHARS - 1] + "…"
        return f"{self.instruction.name} {short}"


def step_of(instruction: Instruction, work: RunProgram | CopyFiles | MakeFolder, below: str, owner: int) -> BuildStep:
    """Return a step on the layers named by `below`, for images that belong to the node's user `owner`."""
    return BuildStep(instruction, work, digest("dockerfile layer", _FORMAT, below, owner, _content_of(work)))


def _content_of(work: RunProgram | CopyFiles | MakeFolder) -> list[object]:
    if isinstance(work, RunProgram):
        mounts = [[each.target, each.kept, each.source and _source_content(each.source)] for each in work.mounts]
        return ["run", work.argv, dict(work.env), work.user, work.workdir, work.stdin, *([mounts] if mounts else [])]
    if isinstance(work, MakeFolder):
        return ["folder", work.path, work.user]
    sources = [_source_content(source) for source in work.sources]
    more = [work.excluded, work.parents] if work.excluded or work.parents else []
    return ["copy", sources, work.target, work.into, work.chown, work.mode, work.unpack, *more]


def _source_content(source: Source) -> list[object]:
    if isinstance(source, FromContext):
        return ["context", source.name.rpartition("/")[2], source.digest]
    if isinstance(source, FromText):
        return ["text", source.name, source.text]
    if isinstance(source, FromAddress):
        return ["address", source.address, source.checksum]
    return ["stage", source.path, source.key]
