"""A Dockerfile as the source of an image: planned to get its key, and built as layers that other images share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeAlias

from farm.errors import ImageError
from farm.settings import settings
from workers.sandboxes.images.building.builder import owner
from workers.sandboxes.images.content_store import digest
from workers.sandboxes.images.dockerfile.build import build_layers
from workers.sandboxes.images.dockerfile.build_place import StartBuild
from workers.sandboxes.images.dockerfile.build_stages import SCRATCH, staged
from workers.sandboxes.images.dockerfile.buildah import build_archive
from workers.sandboxes.images.dockerfile.context import BuildContext
from workers.sandboxes.images.dockerfile.instructions import Instruction, escape_of, read
from workers.sandboxes.images.dockerfile.plan import PlannedStage, check_values, plan
from workers.sandboxes.images.empty_image import empty_image, is_bare
from workers.sandboxes.images.image_cache import ROOT, images
from workers.sandboxes.images.image_sources import ArchiveSource
from workers.sandboxes.images.layered_image import Image, write_layers
from workers.sandboxes.images.runtime import own_folder

PREFIX = "dockerfile:"
"""`dockerfile:FOLDER`, `dockerfile:FOLDER#FILE` or `dockerfile:FOLDER#FILE#STAGE`: a build context, which contains the
Dockerfile by default."""

# the version of the way images are built here; a new number rebuilds all
_FORMAT = 1

FindImage: TypeAlias = Callable[[str], Image | None]


@dataclass(frozen=True, slots=True)
class DockerfileSource:
    """See `workers.sandboxes.images.image_cache.ImageSource`."""

    folder: Path
    file: Path
    target: str
    values: Mapping[str, str]
    find: FindImage = field(compare=False)
    start: StartBuild | None = field(compare=False)
    retry: bool = False
    is_built: ClassVar[bool] = True
    is_whole: ClassVar[bool] = False

    @classmethod
    def of(
        cls, name: str, values: Mapping[str, str], find: FindImage, start: StartBuild | None, retry: bool
    ) -> DockerfileSource:
        """Return the source that an image's name refers to. ImageError if there is no such folder."""
        written, _, rest = name.removeprefix(PREFIX).partition("#")
        file, _, target = rest.partition("#")
        folder = Path(written).absolute()
        if not written or not folder.is_dir():
            raise ImageError(f"image {name}: there is no folder {folder} on this node; it is {PREFIX}FOLDER")
        return cls(folder, folder / (file or "Dockerfile"), target, values, find, start, retry)

    @property
    def reference(self) -> str:
        file = self.file.name if self.file.name != "Dockerfile" or self.target else ""
        shown = "#".join(part for part in (str(self.folder), file, self.target) if part)
        values = ", ".join(f"{name}={value}" for name, value in sorted(self.values.items()))
        return f"{PREFIX}{shown} ({values})" if values else f"{PREFIX}{shown}"

    def key(self) -> str:
        return self._key(self._plan()[-1])

    @staticmethod
    def _key(last: PlannedStage) -> str:
        return digest("dockerfile", _FORMAT, last.key, asdict(last.config), settings().image_builder)

    def make(self, folder: Path) -> None:
        if self.start is None:
            raise ImageError(f"image {self.reference} is built in sandboxes, which this process does not start")
        stages = self._plan()
        last = stages[-1]
        if settings().image_builder == "buildah":
            self._make_by_buildah(stages, folder)
            return
        layers = build_layers(stages, self.start, retry=self.retry)
        (folder / ROOT).mkdir()
        image = replace(
            last.base,
            variables=last.config.env,
            layers=(*layers, *last.base.layers),
            config=last.config,
        )
        if is_bare(image):
            raise ImageError(f"image {self.reference} has no bash, which every sandbox needs")
        write_layers(image, folder)

    def _make_by_buildah(self, stages: list[PlannedStage], folder: Path) -> None:
        """Build the same stages by buildah, on bases that are folders."""
        last = stages[-1]
        begun = [planned for planned in stages if planned.parent is None and planned.stage.base != SCRATCH]
        bases = {str(planned.stage.base): planned.base for planned in begun}
        for name, base in bases.items():
            if base.binds or base.layers:
                raise ImageError(f"image {self.reference}: buildah cannot begin with {name}: it is not a single folder")
        folders = {name: base.folder for name, base in bases.items()}
        with tempfile.TemporaryDirectory(dir=own_folder()) as name:
            archive = build_archive(self.folder, self.file, self.target, self.values, folders, Path(name))
            ArchiveSource("oci-archive", archive).make(folder)
        root = images() / self._key(last) / ROOT
        write_layers(Image(root, variables=last.config.env, config=last.config), folder)

    def _plan(self) -> list[PlannedStage]:
        instructions = read(self.file)
        escape = escape_of(self.file.read_text(encoding="utf-8-sig"))
        file = staged(instructions, self.values, escape)
        target = file.stage(self.target) if self.target else file.stages[-1]
        if target is None:
            raise ImageError(f"image {self.reference}: {self.file} has no stage {self.target}")
        check_values(file, self.values, self.reference)
        context = BuildContext.of(self.folder, self.file)
        return plan(file, target, context, self.values, self._base, owner(), escape)

    def _base(self, name: str, instruction: Instruction) -> Image:
        """Return a base image by name. ImageError, with the line, for an unknown name."""
        if name == SCRATCH:
            return empty_image()
        try:
            result = self.find(name)
        except ImageError as error:
            broken = instruction.refused(f"its image: {error.message}")
            raise ImageError(broken.message, error.lines, retryable=error.retryable) from error
        if result is None:
            raise instruction.refused(
                f"no image of this farm is called {name}: add one by `farm images alias {name} PATH`, where PATH is a "
                "folder, a .sif or an archive; a build with network may also pull it (--network)"
            )
        return result
