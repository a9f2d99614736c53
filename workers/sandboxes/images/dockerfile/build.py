"""Builds of planned stages: each step creates its layer once, and independent stages are built in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from farm.errors import ImageError, ToolError
from farm.settings import settings
from workers.sandboxes.images.building.builder import BUILD_S, N_LINES, is_passing
from workers.sandboxes.images.dockerfile.build_place import BuildPlace, Owner, StartBuild
from workers.sandboxes.images.dockerfile.copying import copy_into
from workers.sandboxes.images.dockerfile.mounting import make_folder, mount, unmount
from workers.sandboxes.images.dockerfile.plan import PlannedStage
from workers.sandboxes.images.dockerfile.steps import BuildStep, FromStage, MakeFolder, RunProgram
from workers.sandboxes.images.dockerfile.user_names import Account, account_of, owner_of_files
from workers.sandboxes.images.image_cache import ROOT, cached, held
from workers.sandboxes.images.layered_image import Image

T = TypeVar("T")

MAX_LAYERS = 120
_PARALLEL = 4
_BIG_LINE = 300


def build_layers(stages: Sequence[PlannedStage], start: StartBuild, *, retry: bool = False) -> tuple[Path, ...]:
    """Return the layers of the last stage, the uppermost first. Raises ImageError, SandboxError. Blocks."""
    return _Build(stages, start, retry).layers_of_last()


class _Build:
    """One build, in threads."""

    def __init__(self, stages: Sequence[PlannedStage], start: StartBuild, retry: bool) -> None:
        self._stages, self._start, self._retry = stages, start, retry
        self._images: dict[int, Future[Image]] = {}

    def layers_of_last(self) -> tuple[Path, ...]:
        last = self._stages[-1]
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="build") as threads:
            # in order, so that a stage's dependencies start before it
            for planned in self._stages:
                work = copy_context().run
                self._images[planned.stage.number] = threads.submit(work, self._build, planned)
            try:
                image = self._images[last.stage.number].result()
            except BaseException:
                for future in self._images.values():
                    future.cancel()
                raise
        return image.layers[: len(image.layers) - len(last.base.layers)]

    def _build(self, planned: PlannedStage) -> Image:
        """Return the files of a stage as an image."""
        image = planned.base if planned.parent is None else self._images[planned.parent].result()
        for step in planned.steps:
            if len(image.layers) >= MAX_LAYERS:
                raise step.instruction.refused(f"an image has {MAX_LAYERS} layers at most: join some RUN or COPY")
            root = cached(LayerSource(step, image, self._start, self._image_of), retry=self._retry)
            image = replace(image, layers=(root, *image.layers))
        return image

    def _image_of(self, source: FromStage) -> Image:
        return source.stage if isinstance(source.stage, Image) else self._images[source.stage].result()


@dataclass(frozen=True)
class LayerSource:
    """The layer of one step on the layers below it. See `workers.sandboxes.images.image_cache.ImageSource`."""

    step: BuildStep
    below: Image
    start: StartBuild = field(compare=False)
    image_of: Callable[[FromStage], Image] = field(compare=False)
    is_built: ClassVar[bool] = True
    is_whole: ClassVar[bool] = False

    @property
    def reference(self) -> str:
        return f"layer {self.step.key[:12]}: {self.step.label}"

    def key(self) -> str:
        return self.step.key

    def make(self, folder: Path) -> None:
        step = self.step
        with ExitStack() as stack:
            for root in (*self.below.layers, *self.below.roots):
                stack.enter_context(held(root))
            place = self.start(self.below)
            try:
                owner, mounted = self._work(place, stack)
                place.finish(folder / ROOT, owner)
                unmount(folder / ROOT, mounted, self.below.lower)
            except ToolError as error:
                raise step.instruction.refused(str(error)) from error
            finally:
                place.stop()

    def _work(self, place: BuildPlace, stack: ExitStack) -> tuple[Owner | None, Sequence[str]]:
        """Execute the step. Return the owner of new files unless it is root, and the mounted paths.

        Programs run as their user, and copies set the owners of their files, so neither returns an owner.
        """
        work = self.step.work
        if isinstance(work, RunProgram):
            account = self._named(place, account_of, work.user)
            mounted = mount(place, work.mounts, self.step.instruction, lambda source: self._other(source, stack))
            self._run(place, work, account)
            return None, mounted
        if isinstance(work, MakeFolder):
            whose = self._named(place, owner_of_files, work.user)
            make_folder(place, work.path, 0o755)
            return whose if any(whose) else None, ()
        owner = self._named(place, owner_of_files, work.chown) if work.chown else None
        copy_into(place, work, self.step.instruction, lambda source: self._other(source, stack), owner)
        return None, ()

    def _other(self, source: FromStage, stack: ExitStack) -> BuildPlace:
        """Return a sandbox with the files of another stage, until the layer is complete."""
        other = self.start(self.image_of(source))
        stack.callback(other.stop)
        return other

    def _named(self, place: BuildPlace, found: Callable[[BuildPlace, str], T], user: str) -> T:
        try:
            return found(place, user)
        except ValueError as error:
            raise self.step.instruction.refused(str(error)) from None

    def _run(self, place: BuildPlace, work: RunProgram, account: Account) -> None:
        env = {"HOME": account.home, **settings().build_env, **work.env}
        result = place.run(
            work.argv,
            env=env,
            cwd=work.workdir,
            identity=account.identity,
            stdin=work.stdin.encode(),
            timeout_s=BUILD_S,
        )
        if result.code == 0:
            return
        end = f"not done within {BUILD_S:.0f} s" if result.code is None else f"exit code {result.code}"
        lines = [line.strip() for line in result.output.splitlines() if line.strip()][-N_LINES:]
        advice = "" if settings().build_network else _network_advice(lines)
        failed = self.step.instruction.refused("; ".join(part for part in (end, result.limit, advice) if part))
        passing = result.code is None or (is_passing(lines) and not advice)
        raise ImageError(failed.message, [line[:_BIG_LINE] for line in lines], retryable=passing)


def _network_advice(lines: Sequence[str]) -> str:
    """Return advice if a program seems to have failed for lack of network, else an empty text."""
    signs = ("resolve", "resolution", "network is unreachable", "no route to host", "name or service not known")
    if any(sign in line.lower() for line in lines for sign in signs):
        return "builds have no network: allow it by FARM_BUILD_NETWORK=1, or `farm images build --network`"
    return ""
