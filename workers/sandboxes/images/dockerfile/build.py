"""Builds of planned stages: each step creates its layer once, and independent stages are built in parallel.

Files that RUN mounts are copied to the writable layer of a step while its program runs, and removed afterwards. So no
kernel mount is needed: files hidden by a mount are deleted only in the layer, and reappear with the removal.
"""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from farm.errors import ImageError, ToolError
from workers.config import SandboxConfig
from workers.sandboxes.images.building.builder import BUILD_S, N_LINES, is_passing
from workers.sandboxes.images.dockerfile.context import copy_files
from workers.sandboxes.images.dockerfile.copying import OpenStage, copy_into
from workers.sandboxes.images.dockerfile.instructions import Instruction
from workers.sandboxes.images.dockerfile.plan import PlannedStage
from workers.sandboxes.images.dockerfile.steps import (
    BuildStep,
    FromContext,
    FromStage,
    MakeFolder,
    RunMount,
    RunProgram,
)
from workers.sandboxes.images.image_cache import ROOT, cached, held
from workers.sandboxes.images.layered_image import Image
from workers.sandboxes.remove_tree import remove

if TYPE_CHECKING:
    from workers.sandboxes.build_sandbox import BuildSandbox, Owner, StartBuild

T = TypeVar("T")

MAX_LAYERS = 120
_PARALLEL = 4
_BIG_LINE = 300

# the target of links, because the layer has its files there
_REAL = (
    'if [ -d "$1" ]; then cd -P -- "$1"; echo "folder:$PWD"; else cd -P -- "${1%/*}/"; echo "file:$PWD/${1##*/}"; fi'
)
# folders such as /run contain real mounts, which cannot be deleted and stay
_CLEAR = 'shopt -s nullglob dotglob; for each in "$1"/*; do rm -rf -- "$each" 2>/dev/null; done; :'
_DELETE = 'if [ -e "$1" ] || [ -L "$1" ]; then rm -f -- "$1"; fi'
_OPEN_TO_ALL = 0o1777


def build_layers(
    config: SandboxConfig, stages: Sequence[PlannedStage], start: StartBuild, *, retry: bool = False
) -> tuple[Path, ...]:
    """Return the layers of the last stage, the uppermost first. Raises ImageError, SandboxError. Blocks."""
    images: dict[int, Future[Image]] = {}

    def image_of(source: FromStage) -> Image:
        return source.stage if isinstance(source.stage, Image) else images[source.stage].result()

    def build(planned: PlannedStage) -> Image:
        image = planned.base if planned.parent is None else images[planned.parent].result()
        for step in planned.steps:
            if len(image.layers) >= MAX_LAYERS:
                raise step.instruction.refused(f"an image has {MAX_LAYERS} layers at most: join some RUN or COPY")
            root = cached(config, LayerSource(config, step, image, start, image_of), retry=retry)
            image = replace(image, layers=(root, *image.layers))
        return image

    last = stages[-1]
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="build") as threads:
        # in order, so that a stage's dependencies start before it
        for planned in stages:
            images[planned.stage.number] = threads.submit(copy_context().run, build, planned)
        try:
            image = images[last.stage.number].result()
        except BaseException:
            for future in images.values():
                future.cancel()
            raise
    return image.layers[: len(image.layers) - len(last.base.layers)]


@dataclass(frozen=True)
class LayerSource:
    """The layer of one step on the layers below it. See `workers.sandboxes.images.image_cache.ImageSource`."""

    config: SandboxConfig
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
                stack.enter_context(held(self.config, root))
            sandbox = self.start(self.below)
            try:
                owner, mounted = self._work(sandbox, stack)
                sandbox.finish(folder / ROOT, owner)
                unmount(folder / ROOT, mounted, self.below.lower)
            except ToolError as error:
                raise step.instruction.refused(str(error)) from error
            finally:
                sandbox.stop()

    def _work(self, sandbox: BuildSandbox, stack: ExitStack) -> tuple[Owner | None, Sequence[str]]:
        """Execute the step. Return the owner of new files unless it is root, and the mounted paths.

        Programs run as their user, and copies set the owners of their files, so neither returns an owner.
        """
        work = self.step.work
        if isinstance(work, RunProgram):
            account = self._named(sandbox, account_of, work.user)
            mounted = mount(sandbox, work.mounts, self.step.instruction, lambda source: self._other(source, stack))
            self._run(sandbox, work, account)
            return None, mounted
        if isinstance(work, MakeFolder):
            whose = self._named(sandbox, owner_of_files, work.user)
            sandbox.make_folder(work.path, 0o755)
            return whose if any(whose) else None, ()
        owner = self._named(sandbox, owner_of_files, work.chown) if work.chown else None
        copy_into(self.config, sandbox, work, self.step.instruction, lambda source: self._other(source, stack), owner)
        return None, ()

    def _other(self, source: FromStage, stack: ExitStack) -> BuildSandbox:
        """Return a sandbox with the files of another stage, until the layer is complete."""
        other = self.start(self.image_of(source))
        stack.callback(other.stop)
        return other

    def _named(self, sandbox: BuildSandbox, look_up: Callable[[BuildSandbox, str], T], user: str) -> T:
        try:
            return look_up(sandbox, user)
        except ValueError as error:
            raise self.step.instruction.refused(str(error)) from None

    def _run(self, sandbox: BuildSandbox, work: RunProgram, account: Account) -> None:
        env = {"HOME": account.home, **self.config.build_env, **work.env}
        done = sandbox.run(
            work.argv,
            env=env,
            cwd=work.workdir,
            identity=account.identity,
            stdin=work.stdin.encode(),
            timeout_s=BUILD_S,
        )
        if done.code == 0:
            return
        end = f"not done within {BUILD_S:.0f} s" if done.code is None else f"exit code {done.code}"
        lines = [line.strip() for line in done.output.splitlines() if line.strip()][-N_LINES:]
        advice = "" if self.config.build_network else _network_advice(lines)
        failed = self.step.instruction.refused("; ".join(part for part in (end, done.limit, advice) if part))
        passing = done.code is None or (is_passing(lines) and not advice)
        raise ImageError(failed.message, [line[:_BIG_LINE] for line in lines], retryable=passing)


def _network_advice(lines: Sequence[str]) -> str:
    signs = ("resolve", "resolution", "network is unreachable", "no route to host", "name or service not known")
    if any(sign in line.lower() for line in lines for sign in signs):
        return "builds have no network: allow it by FARM_BUILD_NETWORK=1, or `farm images build --network`"
    return ""


@dataclass(frozen=True, slots=True)
class Account:
    """A user by number, with its group and home folder."""

    uid: int
    gid: int
    home: str

    @property
    def identity(self) -> tuple[int, int] | None:
        """User and group of its programs; None for root, which is the default."""
        return (self.uid, self.gid) if self.uid else None


def account_of(sandbox: BuildSandbox, written: str) -> Account:
    """Return the account of USER: a name or number, optionally with a group after a colon. ValueError if unknown."""
    return account_in(written, _lines(sandbox, "/etc/passwd"), _lines(sandbox, "/etc/group"))


def owner_of_files(sandbox: BuildSandbox, written: str) -> Owner:
    """Return the owner for --chown or WORKDIR. A number without a group is also the group. ValueError if unknown."""
    account = account_of(sandbox, written)
    return (account.uid, account.uid) if written.isdigit() else (account.uid, account.gid)


def account_in(written: str, passwd: list[list[str]], group: list[list[str]]) -> Account:
    """Return the account like `account_of`, from the parsed lines of the two files."""
    user, _, of_group = written.partition(":")
    user = user or "0"
    entry = next((line for line in passwd if len(line) >= 6 and user in (line[0], line[2])), None)
    if entry is None and not user.isdigit():
        raise ValueError(f"the image has no user {user}")
    uid, gid, home = (int(entry[2]), int(entry[3]), entry[5]) if entry else (int(user), 0, "/")
    if of_group:
        named = next((line for line in group if len(line) >= 3 and of_group in (line[0], line[2])), None)
        if named is None and not of_group.isdigit():
            raise ValueError(f"the image has no group {of_group}")
        gid = int(named[2]) if named else int(of_group)
    return Account(uid, gid, home or ("/root" if uid == 0 else "/"))


def _lines(sandbox: BuildSandbox, path: str) -> list[list[str]]:
    try:
        text = sandbox.read_file(path).decode(errors="replace")
    except ToolError:
        return [["root", "", "0", "0", "", "/root", ""]] if path.endswith("passwd") else []
    return [line.split(":") for line in text.splitlines() if line and not line.startswith("#")]


def mount(
    sandbox: BuildSandbox, mounts: Sequence[RunMount], instruction: Instruction, open_stage: OpenStage
) -> list[str]:
    """Create all files; return the paths that are not part of the layer, for `unmount`. ImageError. Blocks."""
    mounted = []
    for each in mounts:
        sandbox.make_folder(posixpath.dirname(each.target), 0o755)
        kind, _, real = _output_of(sandbox, _REAL, each.target, instruction).partition(":")
        real = posixpath.normpath("/" + real)
        if each.kept:
            sandbox.make_folder(real, 0o755)
            continue
        mounted.append(real)
        other = open_stage(each.source) if isinstance(each.source, FromStage) else None
        is_folder = each.source is None or _is_folder(each.source, other)
        if kind == "folder" and is_folder:
            _output_of(sandbox, _CLEAR, real, instruction)
        elif kind == "folder":
            raise instruction.refused(f"--mount: {each.target} is a folder, and its source is a file")
        else:
            _output_of(sandbox, _DELETE, real, instruction)
        if each.source is None:
            sandbox.make_folder(real, _OPEN_TO_ALL)
        elif isinstance(each.source, FromContext):
            with tempfile.TemporaryDirectory() as name:
                copy_files(each.source.files, Path(name, "staged"))
                sandbox.upload(Path(name, "staged"), real)
        elif other is not None:
            sandbox.copy_from(other, each.source.path, real)
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


def _is_folder(source: FromContext | FromStage, other: BuildSandbox | None) -> bool:
    if isinstance(source, FromContext):
        return source.files[0].path.is_dir()
    return other is not None and other.is_folder(source.path)


def _output_of(sandbox: BuildSandbox, script: str, path: str, instruction: Instruction) -> str:
    done = sandbox.run(["bash", "-c", script, "bash", path])
    if done.code:
        raise instruction.refused(f"--mount at {path}: {done.output.strip()[-200:]}")
    return done.output.strip()
