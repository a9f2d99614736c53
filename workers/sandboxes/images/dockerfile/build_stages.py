"""Stages of a Dockerfile: their bases, their dependencies on others, and the stages that a target needs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from farm.errors import ImageError
from workers.sandboxes.images.dockerfile.instructions import Expansion, Instruction, origins_of, parse, raw_words

_FROM = re.compile(r"(\S+)(?:\s+as\s+([a-z][a-z0-9_.-]*))?", re.IGNORECASE)
SCRATCH = "scratch"
"""The name of the image without files."""
_MAKE_FILES = ("ADD", "COPY", "RUN", "WORKDIR")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def platform_arguments() -> dict[str, str]:
    """Return the build arguments for the platform, which a Dockerfile may declare without a value."""
    machine = os.uname().machine
    architecture = _MACHINES.get(machine, machine)
    values = {"OS": "linux", "ARCH": architecture, "PLATFORM": f"linux/{architecture}", "VARIANT": ""}
    return {f"{of}{name}": value for of in ("TARGET", "BUILD") for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class BuildStage:
    """One stage: `base` is an image's name or an earlier stage's number."""

    number: int
    name: str
    start: Instruction
    base: str | int
    instructions: tuple[Instruction, ...]

    @property
    def whole_tree(self) -> Instruction | None:
        """Return the COPY by which an empty stage gets exactly the files of another stage; None for other stages.

        This idiom squashes an image into one layer: FROM scratch, COPY --from=STAGE / /.
        """
        first = next((each for each in self.instructions if each.name in _MAKE_FILES), None)
        if self.base != SCRATCH or first is None or first.name != "COPY" or "$" in (first.flag("from") or "$"):
            return None
        words = first.words if first.words is not None else first.text.split()
        is_plain = {name for name, _ in first.flags} <= {"from", "link"}
        return first if is_plain and [os.path.normpath(word) for word in words] == ["/", "/"] else None

    def other(self, name: str) -> bool:
        """Return whether a name is this stage's name or number."""
        return name.lower() == self.name.lower() or name == str(self.number)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A whole Dockerfile: its stages, and the arguments before the first stage."""

    stages: tuple[BuildStage, ...]
    arguments: Mapping[str, str]
    before: tuple[Instruction, ...] = ()

    def stage(self, name: str) -> BuildStage | None:
        """Return the stage with a name or number; None if there is none."""
        return next((stage for stage in self.stages if stage.other(name)), None)

    def declared(self) -> set[str]:
        """Return the names of all declared build arguments."""
        inside = (instruction for stage in self.stages for instruction in stage.instructions)
        every = (one for one in (*self.before, *inside) if one.name == "ARG")
        return {word.partition("=")[0] for one in every for word in raw_words(one.text)}

    def needed(self, target: BuildStage) -> list[BuildStage]:
        """Return the stages that a target depends on, itself the last. ImageError for a dependency on a later stage."""
        wanted = {target.number}
        for stage in reversed(self.stages[: target.number + 1]):
            if stage.number in wanted:
                wanted |= {other.number for other in self.sources(stage)}
        return [stage for stage in self.stages if stage.number in wanted]

    def sources(self, stage: BuildStage) -> list[BuildStage]:
        """Return the stages that a stage begins with or copies from. ImageError for one that comes later."""
        stages = [self.stages[stage.base]] if isinstance(stage.base, int) else []
        for instruction in stage.instructions:
            for name in _origins(instruction):
                other = self.stage(name)
                if other is not None and other.number >= stage.number:
                    raise instruction.refused(f"the stage {name} does not come before it")
                stages += [other] if other else []
        return stages


def _origins(instruction: Instruction) -> list[str]:
    if instruction.name == "RUN":
        return origins_of(instruction)
    name = instruction.flag("from") if instruction.name in ("COPY", "ADD") else None
    return [name] if name else []


def staged(instructions: Sequence[Instruction], values: Mapping[str, str], escape: str = "\\") -> StagedFile:
    """Return the stages, with the values of build arguments. ImageError for instructions outside of stages."""
    arguments = dict(platform_arguments())
    stages: list[BuildStage] = []
    for at, instruction in enumerate(instructions):
        if instruction.name == "FROM":
            rest = instructions[at + 1 :]
            end = next((n for n, each in enumerate(rest) if each.name == "FROM"), len(rest))
            stages.append(_stage(instruction, stages, arguments, tuple(rest[:end]), escape))
        elif not stages and instruction.name == "ARG":
            arguments |= arguments_of(instruction, Expansion(arguments, escape), values, {})
        elif not stages:
            raise instruction.refused("a Dockerfile begins with FROM, and before it only ARG may stand")
    if not stages:
        raise ImageError(f"{instructions[0].file} has no FROM")
    before = tuple(instructions[: instructions.index(stages[0].start)])
    return StagedFile(tuple(stages), arguments, before)


def _stage(
    start: Instruction,
    before: Sequence[BuildStage],
    arguments: Mapping[str, str],
    instructions: tuple[Instruction, ...],
    escape: str,
) -> BuildStage:
    match = _FROM.fullmatch(start.text)
    if match is None:
        raise start.refused("the form is FROM IMAGE or FROM IMAGE AS NAME")
    image = expanded(start, Expansion(arguments, escape), match[1])
    if not image:
        raise start.refused("the name of its image is empty: give the ARG in it a value")
    _check_platform(start, Expansion(arguments, escape))
    earlier = next((stage for stage in reversed(before) if stage.name and stage.name.lower() == image.lower()), None)
    if earlier is None:
        return BuildStage(len(before), match[2] or "", start, image, instructions)
    triggers = [triggered(one, one.text) for one in earlier.instructions if one.name == "ONBUILD"]
    return BuildStage(len(before), match[2] or "", start, earlier.number, (*triggers, *instructions))


def triggered(onbuild: Instruction, text: str) -> Instruction:
    """Return the instruction of an ONBUILD, located at the ONBUILD. ImageError if it is invalid."""
    parsed = parse(text, onbuild.file)
    if len(parsed) != 1 or parsed[0].name in ("ONBUILD", "FROM", "MAINTAINER"):
        raise onbuild.refused("ONBUILD takes one instruction, and not ONBUILD, FROM or MAINTAINER")
    return replace(parsed[0], line=onbuild.line)


def _check_platform(start: Instruction, expansion: Expansion) -> None:
    """Raise ImageError for a platform that is not this node's."""
    for name, value in start.flags:
        if name != "platform":
            raise start.refused(f"--{name} is not known")
        wanted = expanded(start, expansion, value)
        ours = platform_arguments()["TARGETPLATFORM"]
        if wanted and "/".join(wanted.split("/")[:2]) != ours:
            raise start.refused(f"its platform is {wanted}, and this node's is {ours}")


def expanded(instruction: Instruction, expansion: Expansion, text: str) -> str:
    """Return a text with its variables replaced. ImageError that names the instruction."""
    try:
        return expansion.text(text)
    except ValueError as error:
        raise instruction.refused(str(error)) from None


def arguments_of(
    instruction: Instruction, expansion: Expansion, values: Mapping[str, str], outer: Mapping[str, str]
) -> dict[str, str]:
    """Return the arguments declared by an ARG: `values` override its defaults, which override those of `outer`."""
    arguments: dict[str, str] = {}
    try:
        for word in expansion.words(instruction.text):
            name, equals, default = word.partition("=")
            if name in values:
                arguments[name] = values[name]
            elif equals:
                arguments[name] = default
            elif name in outer:
                arguments[name] = outer[name]
    except ValueError as error:
        raise instruction.refused(str(error)) from None
    return arguments
