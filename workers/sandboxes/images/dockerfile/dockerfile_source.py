"""A Dockerfile as the source of an image: planned to get its key, and built as layers that other images share.

`buildah`, if it is chosen, builds a single layer, which is read as an OCI archive. It supports all instructions, and
pulls base images itself if builds have network; without network, it gets those in the table of names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from farm.errors import ImageError, SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.images.building.builder import BUILD_S, N_LINES, is_passing, owner
from workers.sandboxes.images.content_store import digest
from workers.sandboxes.images.dockerfile.build import build_layers
from workers.sandboxes.images.dockerfile.build_stages import SCRATCH, staged
from workers.sandboxes.images.dockerfile.context import BuildContext
from workers.sandboxes.images.dockerfile.instructions import Instruction, escape_of, read
from workers.sandboxes.images.dockerfile.plan import PlannedStage, check_values, plan
from workers.sandboxes.images.image_cache import ROOT
from workers.sandboxes.images.image_sources import ArchiveSource
from workers.sandboxes.images.layered_image import Image, empty_image, is_bare, write_layers
from workers.sandboxes.images.runtime import own_folder

if TYPE_CHECKING:
    from workers.sandboxes.build_sandbox import StartBuild

PREFIX = "dockerfile:"
"""`dockerfile:FOLDER`, `dockerfile:FOLDER#FILE` or `dockerfile:FOLDER#FILE#STAGE`: a build context, which contains the
Dockerfile by default."""

# the version of the way images are built here; a new number rebuilds all
_FORMAT = 1

FindImage: TypeAlias = Callable[[str], Image | None]

_PROXY = re.compile(r"(https?|ftp|no)_proxy", re.IGNORECASE)
# programs of a build have the same network as buildah itself
_CHROOT = ("--isolation", "chroot")


@dataclass(frozen=True, slots=True)
class DockerfileSource:
    """See `workers.sandboxes.images.image_cache.ImageSource`."""

    config: SandboxConfig
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
        cls,
        config: SandboxConfig,
        name: str,
        values: Mapping[str, str],
        find: FindImage,
        start: StartBuild | None,
        retry: bool,
    ) -> DockerfileSource:
        """Return the source that an image's name refers to. ImageError if there is no such folder."""
        written, _, rest = name.removeprefix(PREFIX).partition("#")
        file, _, target = rest.partition("#")
        folder = Path(written).absolute()
        if not written or not folder.is_dir():
            raise ImageError(f"image {name}: there is no folder {folder} on this node; it is {PREFIX}FOLDER")
        return cls(config, folder, folder / (file or "Dockerfile"), target, values, find, start, retry)

    @property
    def reference(self) -> str:
        file = self.file.name if self.file.name != "Dockerfile" or self.target else ""
        shown = "#".join(part for part in (str(self.folder), file, self.target) if part)
        values = ", ".join(f"{name}={value}" for name, value in sorted(self.values.items()))
        return f"{PREFIX}{shown} ({values})" if values else f"{PREFIX}{shown}"

    def key(self) -> str:
        return self._key(self._plan()[-1])

    def _key(self, last: PlannedStage) -> str:
        return digest("dockerfile", _FORMAT, last.key, asdict(last.config), self.config.image_builder)

    def make(self, folder: Path) -> None:
        if self.start is None:
            raise ImageError(f"image {self.reference} is built in sandboxes, which this process does not start")
        stages = self._plan()
        last = stages[-1]
        if self.config.image_builder == "buildah":
            self._make_by_buildah(stages, folder)
            return
        layers = build_layers(self.config, stages, self.start, retry=self.retry)
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
        last = stages[-1]
        begun = [planned for planned in stages if planned.parent is None and planned.stage.base != SCRATCH]
        bases = {str(planned.stage.base): planned.base for planned in begun}
        for name, base in bases.items():
            if base.binds or base.layers:
                raise ImageError(f"image {self.reference}: buildah cannot begin with {name}: it is not a single folder")
        folders = {name: base.folder for name, base in bases.items()}
        with tempfile.TemporaryDirectory(dir=own_folder(self.config)) as name:
            archive = build_archive(self.config, self.folder, self.file, self.target, self.values, folders, Path(name))
            ArchiveSource(self.config, "oci-archive", archive).make(folder)
        root = self.config.images_folder / self._key(last) / ROOT
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
        return plan(self.config, file, target, context, self.values, self._base, owner(self.config.user), escape)

    def _base(self, name: str, instruction: Instruction) -> Image:
        if name == SCRATCH:
            return empty_image(self.config)
        try:
            base = self.find(name)
        except ImageError as error:
            broken = instruction.refused(f"its image: {error.message}")
            raise ImageError(broken.message, error.lines, retryable=error.retryable) from error
        if base is None:
            raise instruction.refused(
                f"no image of this farm is called {name}: add one by `farm images alias {name} PATH`, where PATH is a "
                "folder, a .sif or an archive; a build with network may also pull it (--network)"
            )
        return base


def buildah_program() -> Path:
    """Return the program. Raises SandboxError if it is not installed."""
    path = shutil.which("buildah")
    if path is None:
        raise SandboxError("no buildah on PATH: install it, or leave FARM_IMAGE_BUILDER at `own`")
    return Path(path)


def build_archive(
    config: SandboxConfig,
    folder: Path,
    file: Path,
    target: str,
    values: Mapping[str, str],
    folders: Mapping[str, Path],
    work_folder: Path,
) -> Path:
    """Build a Dockerfile and return the OCI archive. ImageError with the last lines. Blocks.

    `folders` are the root file systems of the base images by name; `work_folder` is empty.
    """
    if others := sorted(name for name in config.build_env if not _PROXY.fullmatch(name)):
        raise SandboxError(
            f"{file}: buildah gives builds no variables but proxies, and FARM_BUILD_ENV has {', '.join(others)}: mount "
            "a file by FARM_BUILD_FILES, such as /etc/pip.conf, or leave FARM_IMAGE_BUILDER at `own`"
        )
    store = ["--root", str(work_folder / "store"), "--runroot", str(work_folder / "run"), "--storage-driver", "vfs"]
    for name, root in folders.items():
        # a base image from a folder, under the name that Dockerfiles use for it
        container = _run(config, [*store, "from", "scratch"], name, work_folder).strip().splitlines()[-1]
        _run(config, [*store, "add", "--quiet", container, str(root), "/"], name, work_folder)
        _run(config, [*store, "commit", "--quiet", "--rm", container, name], name, work_folder)
    words = ["build", *_CHROOT, "--pull=missing" if config.build_network else "--pull=never"]
    words += ["--format", "docker", "--file", str(file), "--tag", "built:latest"]
    words += [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
    words += [word for inside, path in config.build_files.items() for word in ("--volume", f"{path}:{inside}:ro")]
    words += ["--target", target] if target else []
    _run(config, [*store, *words, str(folder)], f"{file}: it", work_folder)
    archive = work_folder / "image.tar"
    _run(config, [*store, "push", "built:latest", f"oci-archive:{archive}"], f"{file}: what buildah built", work_folder)
    return archive


def _without_network(config: SandboxConfig) -> list[str]:
    if config.build_network:
        return []
    if os.geteuid() != 0:
        raise SandboxError("an ordinary user's buildah has the node's network: allow it by FARM_BUILD_NETWORK=1")
    return ["unshare", "--net", "--"]


def _run(config: SandboxConfig, words: Sequence[str], what: str, work_folder: Path) -> str:
    bound = ["setpriv", "--pdeathsig", "KILL", "--", *_without_network(config), str(buildah_program()), *words]
    log = work_folder / "log"
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                bound,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                timeout=BUILD_S,
                cwd=work_folder,
                # not by arguments of the command, which every user of the machine can see
                env=os.environ | config.build_env,
            )
    except subprocess.TimeoutExpired:
        raise ImageError(f"{what} could not be built by buildah within {BUILD_S:.0f} s", retryable=True) from None
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        lines = [line for line in (text + log.read_text(errors="replace")).splitlines() if line.strip()][-N_LINES:]
        raise ImageError(f"{what} could not be built by buildah", lines, retryable=is_passing(lines))
    return text
