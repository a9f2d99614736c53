"""From a Dockerfile to the steps of a build: all inputs of each instruction are known before anything is run.

COPY and ADD are planned by BuildKit's rules.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from farm.errors import ImageError
from workers.config import SandboxConfig
from workers.sandboxes.images.dockerfile.build_stages import BuildStage, StagedFile, arguments_of, expanded, triggered
from workers.sandboxes.images.dockerfile.context import (
    BuildContext,
    ContextFile,
    Patterns,
    digest_of,
    file_mode,
    glob_pattern,
    ignore_patterns,
    ignores,
    is_pattern,
)
from workers.sandboxes.images.dockerfile.copying import is_address, remote_file
from workers.sandboxes.images.dockerfile.image_config import ImageConfig, healthcheck_of
from workers.sandboxes.images.dockerfile.instructions import (
    Expansion,
    Instruction,
    MountOptions,
    is_only_heredoc,
    mounts_of,
    without_heredocs,
)
from workers.sandboxes.images.dockerfile.steps import (
    BuildStep,
    CopyFiles,
    FromContext,
    FromStage,
    FromText,
    MakeFolder,
    RunMount,
    RunProgram,
    Source,
    step_of,
)
from workers.sandboxes.images.layered_image import Image

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ONE_USER = (
    "owners of files are noted and shown to programs of root, but do not affect access: "
    "see docs/how-to/operators/images.md"
)

_RUN_FLAGS = {"network": ("default", "none", "host"), "security": ("sandbox",)}

BaseImages: TypeAlias = Callable[[str, Instruction], Image]
"""Function from an image's name and its instruction to the image. ImageError if there is none."""

_FLAGS = {
    "COPY": {"from", "chown", "chmod", "link", "exclude", "parents"},
    "ADD": {"chown", "chmod", "link", "exclude", "checksum", "unpack", "keep-git-dir"},
}


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage: its base (an image or an earlier stage), its own steps, and the settings to run programs in it.

    `key` names all of its files by content.
    """

    stage: BuildStage
    base: Image
    parent: int | None
    steps: tuple[BuildStep, ...]
    config: ImageConfig
    key: str


def plan(
    config: SandboxConfig,
    file: StagedFile,
    target: BuildStage,
    context: BuildContext,
    values: Mapping[str, str],
    base_image: BaseImages,
    owner: int,
    escape: str = "\\",
) -> list[PlannedStage]:
    """Return the stages that a target needs, itself the last. ImageError, with the line, if one cannot be built."""
    done: dict[int, PlannedStage] = {}
    for stage in file.needed(target):
        if isinstance(stage.base, int):
            below = done[stage.base]
            # they are among the stage's own instructions already
            start = _State(below.base, stage.base, below.key, replace(below.config, onbuild=()))
            triggers: Sequence[Instruction] = ()
        elif stage.whole_tree is not None:
            start, triggers = _all_of(config, stage.whole_tree, file, done, base_image), ()
        else:
            base = base_image(stage.base, stage.start)
            begun = replace(base.config, env={"PATH": SEARCH_PATH, **base.variables}, onbuild=())
            start = _State(base, None, base.key(config), begun)
            triggers = [triggered(stage.start, text) for text in base.config.onbuild]
        planner = _Planner(config, file, context, values, done, base_image, owner, escape, start)
        for instruction in (*triggers, *stage.instructions):
            if instruction is not stage.whole_tree:
                planner.take(instruction)
        state = planner.state
        done[stage.number] = PlannedStage(stage, state.base, state.parent, tuple(state.steps), state.config, state.key)
    return list(done.values())


@dataclass(slots=True)
class _State:
    """The state of a stage after the instructions read so far."""

    base: Image
    parent: int | None
    key: str
    config: ImageConfig
    steps: list[BuildStep] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    has_command: bool = False


def _all_of(
    config: SandboxConfig,
    copy: Instruction,
    file: StagedFile,
    done: Mapping[int, PlannedStage],
    base_image: BaseImages,
) -> _State:
    name, begun = copy.flag("from") or "", ImageConfig(env={"PATH": SEARCH_PATH})
    if (other := file.stage(name)) is not None:
        return _State(done[other.number].base, other.number, done[other.number].key, begun)
    base = base_image(name, copy)
    return _State(base, None, base.key(config), begun)


@dataclass(slots=True)
class _Planner:
    config: SandboxConfig
    file: StagedFile
    context: BuildContext
    values: Mapping[str, str]
    done: Mapping[int, PlannedStage]
    base_image: BaseImages
    owner: int
    escape: str
    state: _State

    def take(self, instruction: Instruction) -> None:
        """Add the step of an instruction, or record its setting. Raises ImageError."""
        try:
            self._read(instruction)
        except ValueError as error:
            raise instruction.refused(str(error)) from None
        except OSError as error:
            raise instruction.refused(f"{error.filename}: {error.strerror}") from None

    @property
    def _expansion(self) -> Expansion:
        return Expansion({**self.state.arguments, **self.state.config.env}, self.escape)

    def _note(self, text: str) -> None:
        notes = self.state.config.notes
        self._set(notes=notes if text in notes else (*notes, text))

    def _set(self, **values: object) -> None:
        self.state.config = replace(self.state.config, **values)  # type: ignore[arg-type]

    def _add(self, instruction: Instruction, work: RunProgram | CopyFiles | MakeFolder) -> None:
        step = step_of(instruction, work, self.state.key, self.owner)
        self.state.steps.append(step)
        self.state.key = step.key

    def _path(self, written: str) -> str:
        return posixpath.normpath(posixpath.join(self.state.config.workdir or "/", written))

    def _read(self, instruction: Instruction) -> None:
        config, text = self.state.config, instruction.text
        match instruction.name:
            case "ADD" | "COPY":
                self._copy(instruction)
            case "ARG":
                self.state.arguments |= arguments_of(instruction, self._expansion, self.values, self.file.arguments)
            case "CMD":
                self._set(command=_command(instruction))
                self.state.has_command = True
            case "ENTRYPOINT":
                self._set(entrypoint=_command(instruction))
                if not self.state.has_command:
                    self._set(command=None)
            case "ENV":
                self._set(env={**config.env, **self._pairs(text, "the form is ENV NAME=VALUE or ENV NAME VALUE")})
            case "EXPOSE":
                self._set(exposed=(*config.exposed, *self._expansion.words(text)))
            case "HEALTHCHECK":
                self._set(healthcheck=healthcheck_of(instruction))
            case "LABEL":
                self._set(labels={**config.labels, **self._pairs(text)})
            case "MAINTAINER":
                self._set(labels={**config.labels, "maintainer": text})
            case "ONBUILD":
                triggered(instruction, text)
                self._set(onbuild=(*config.onbuild, text))
            case "RUN":
                self._run(instruction)
            case "SHELL":
                if not instruction.words:
                    raise ValueError('it must be a JSON list, such as SHELL ["/bin/bash", "-c"]')
                self._set(shell=instruction.words)
            case "STOPSIGNAL":
                self._set(stop_signal=self._expansion.text(text))
            case "USER":
                self._set(user=self._expansion.text(text))
                self._note(ONE_USER)
            case "VOLUME":
                words = instruction.words if instruction.words is not None else self._expansion.words(text)
                self._set(volumes=(*config.volumes, *words))
            case "WORKDIR":
                path = self._path(self._expansion.text(text))
                self._set(workdir=path)
                self._add(instruction, MakeFolder(path, config.user))
            case _:
                raise KeyError(instruction.name)

    def _pairs(self, text: str, form: str = "") -> dict[str, str]:
        """Return names and values of ENV or LABEL. Raises ValueError with `form` for a name alone, if that is given."""
        first = text.split(maxsplit=1)
        if "=" not in first[0] and len(first) == 2:
            return {first[0]: self._expansion.text(first[1])}
        if "=" not in first[0] and form:
            raise ValueError(form)
        return dict(self._expansion.pairs(text))

    def _run(self, instruction: Instruction) -> None:
        for name, value in instruction.flags:
            if name != "mount" and value not in _RUN_FLAGS.get(name, ()):
                raise ValueError(f"--{name}={value} is not supported")
        options = mounts_of(instruction, self._expansion)
        mounts = tuple(each for one in options for each in self._mount(instruction, one))
        config, text = self.state.config, instruction.text
        # the build's own variables, which ENV overrides
        env = {**self.state.arguments, **config.env}
        stdin = ""
        if instruction.words is not None:
            argv: Sequence[str] = instruction.words
        elif instruction.heredocs and is_only_heredoc(text):
            body = instruction.heredocs[0].text
            argv, stdin = (*config.shell, body), ""
            if body.startswith("#!"):
                argv, stdin = (*body.partition("\n")[0][2:].split(), "/dev/stdin"), body
        else:
            bodies = "".join(f"\n{each.text}{each.name}" for each in instruction.heredocs)
            argv = (*config.shell, text + bodies + ("\n" if bodies else ""))
        if not argv:
            raise ValueError("it has no program")
        self._add(instruction, RunProgram(tuple(argv), env, config.user, config.workdir or "/", stdin, mounts))

    def _mount(self, instruction: Instruction, options: MountOptions) -> Sequence[RunMount]:
        if options.kind in ("secret", "ssh"):
            if options.required:
                raise ValueError(f"--mount=type={options.kind} is required, and builds have no secrets and no keys")
            self._note(f"RUN --mount=type={options.kind} is ignored: builds have none")
            return ()
        target = self._path(options.target)
        if target == "/":
            raise ValueError("--mount cannot be at /")
        if options.kind == "tmpfs":
            return [RunMount(target)]
        if options.kind == "cache":
            self._note("RUN --mount=type=cache is a folder of the image here")
            return [RunMount(target, kept=True)]
        if options.origin:
            return [RunMount(target, self._in_stage(instruction, options.origin, options.source))]
        name = posixpath.normpath("/" + options.source).lstrip("/")
        if name and self.context.named(name) != [name]:
            raise ValueError(f"{name} is not in the context {self.context.folder}, or .dockerignore leaves it out")
        files = tuple(self.context.tree(name))
        return [RunMount(target, FromContext(name, files, digest_of(files, self.config.digests_folder)))]

    def _copy(self, instruction: Instruction) -> None:
        def in_stage(name: str, path: str) -> FromStage:
            return self._in_stage(instruction, name, path)

        digests = self.config.digests_folder
        work = CopyPlanner(instruction, self._expansion, self.context, digests, in_stage, self._path).plan()
        if work is None:
            return
        if work.chown:
            self._note(ONE_USER)
        self._add(instruction, work)

    def _in_stage(self, instruction: Instruction, name: str, path: str) -> FromStage:
        stage = self.file.stage(name)
        # with --parents, the path after /./ is kept
        parts = path.split("/./", 1) if instruction.name == "COPY" and instruction.switch("parents") else [path]
        pivot, *inside = (posixpath.normpath(posixpath.join("/", part)) for part in parts)
        absolute = "/.".join([pivot.rstrip("/") if inside else pivot, *inside]) + ("/" if path.endswith("/") else "")
        if stage is not None and stage.number not in self.done:
            raise ValueError(f"the stage {name} is not built before it")
        if stage is not None:
            return FromStage(absolute, stage.number, self.done[stage.number].key)
        image = self.base_image(expanded(instruction, self._expansion, name), instruction)
        return FromStage(absolute, image, image.key(self.config))


def _command(instruction: Instruction) -> str | list[str]:
    return list(instruction.words) if instruction.words is not None else instruction.text


def check_values(file: StagedFile, values: Mapping[str, str], name: str) -> None:
    """Raise ImageError for a build argument that the Dockerfile does not declare."""
    for unknown in sorted(set(values) - file.declared()):
        known = ", ".join(sorted(file.declared()))
        raise ImageError(f"image {name} declares no build argument {unknown}" + (f"; it has {known}" if known else ""))


@dataclass(frozen=True, slots=True)
class CopyPlanner:
    """Plans one COPY or ADD. `in_stage` finds a path in a named stage or image, `path` makes a target absolute.

    Raises ValueError and ImageError for sources that cannot be copied.
    """

    instruction: Instruction
    expansion: Expansion
    context: BuildContext
    digests: Path
    in_stage: Callable[[str, str], FromStage]
    path: Callable[[str], str]

    def plan(self) -> CopyFiles | None:
        """Return the files to copy; None if patterns match nothing."""
        for name, _ in self.instruction.flags:
            if name not in _FLAGS[self.instruction.name]:
                raise ValueError(f"--{name} is not supported")
        *sources, target = self._words()
        if not sources:
            raise ValueError(f"the form is {self.instruction.name} SOURCE… TARGET")
        excluded = tuple(self._value(each) for name, each in self.instruction.flags if name == "exclude")
        matched = [one for source in sources for one in self._sources_of(source, len(sources), excluded)]
        parents = self.instruction.switch("parents")
        into = target.endswith(("/", "/.", "/..")) or target in (".", "..") or target == ""
        if not matched:
            # patterns are for files that may be absent, such as the lock file of `COPY package.json yarn.lock* ./`
            return None
        if len(matched) > 1 and not into and not parents:
            raise ValueError(f"several sources go into a folder: write {target}/")
        mode = self._value(self.instruction.flag("chmod") or "")
        return CopyFiles(
            tuple(matched),
            self.path(target),
            into,
            self._value(self.instruction.flag("chown") or ""),
            file_mode(mode) if mode else None,
            self.instruction.switch("unpack", self.instruction.name == "ADD"),
            excluded if self._other else (),
            parents and self._other is not None,
        )

    @property
    def _other(self) -> str | None:
        return self.instruction.flag("from")

    def _value(self, written: str) -> str:
        return expanded(self.instruction, self.expansion, written)

    def _words(self) -> list[str]:
        if self.instruction.words is not None:
            return [self.expansion.text(word) for word in self.instruction.words]
        return self.expansion.words(without_heredocs(self.instruction.text))

    def _sources_of(self, source: str, n_sources: int, excluded: Sequence[str]) -> Sequence[Source]:
        if self._other is not None:
            return [self.in_stage(self._other, source)]
        if source.startswith("<<"):
            text = next(each for each in self.instruction.heredocs if each.name == source[2:])
            return [FromText(text.name, self.expansion.inner(text.text) if text.expands else text.text)]
        checksum = self._value(self.instruction.flag("checksum") or "")
        if is_address(source):
            if self.instruction.name != "ADD":
                raise ValueError("COPY does not take a URL: use ADD")
            if checksum and n_sources > 1:
                raise ValueError("--checksum needs a single source")
            return [remote_file(source, checksum)]
        if checksum:
            raise ValueError("--checksum needs a source with a URL")
        patterns = tuple(ignore_patterns("\n".join(excluded)))
        if self.instruction.switch("parents"):
            return self._with_parents(source, patterns)
        names = self._named(source)
        trees = [(name, _kept(name, self.context.tree(name), patterns)) for name in names]
        return [FromContext(name, tuple(files), digest_of(files, self.digests)) for name, files in trees if files]

    def _named(self, source: str) -> list[str]:
        names = self.context.named(source)
        if not names:
            self._refuse_missing(source)
        return names

    def _refuse_missing(self, source: str) -> None:
        if not is_pattern(source):
            raise ValueError(f"{source} is not in the context {self.context.folder}, or .dockerignore leaves it out")

    def _with_parents(self, source: str, excluded: Patterns) -> list[Source]:
        pivot, mark, inside = source.partition("/./")
        if not mark:
            pivot, inside = ".", source
        wanted = glob_pattern(posixpath.normpath("/" + inside).lstrip("/"))
        sources: list[Source] = []
        for name in self._named(pivot):
            tree = _kept(name, self.context.tree(name), excluded)
            files = _matching(tree, wanted.fullmatch) if wanted.pattern else tree
            if files:
                sources.append(FromContext(name, tuple(files), digest_of(files, self.digests)))
        if not sources:
            self._refuse_missing(source)
        return sources


def _kept(name: str, files: Sequence[ContextFile], excluded: Patterns) -> list[ContextFile]:
    """Return the files of a source that are not excluded, by their path below it, or its own name for itself."""
    if files and len(files) == 1 and name and not files[0].path.is_dir():
        return [] if ignores(excluded, posixpath.basename(name)) else list(files)
    return [file for file in files if not file.relative or not ignores(excluded, file.relative)]


def _matching(files: Sequence[ContextFile], wanted: Callable[[str], object]) -> list[ContextFile]:
    kept: set[str] = set()
    for file in files:
        parts = file.relative.split("/")
        above = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if file.relative and any(map(wanted, above)):
            kept.update(("", *above))
    return [file for file in files if file.relative in kept]
