"""From a COPY or ADD to the files that it copies: flags, patterns and pivots, by BuildKit's rules."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.sandboxes.images.dockerfile.build_stages import expanded
from workers.sandboxes.images.dockerfile.context import (
    BuildContext,
    ContextFile,
    Patterns,
    digest_of,
    glob_pattern,
    ignore_patterns,
    ignores,
    is_pattern,
)
from workers.sandboxes.images.dockerfile.file_modes import file_mode
from workers.sandboxes.images.dockerfile.instructions import Instruction, without_heredocs
from workers.sandboxes.images.dockerfile.remote_files import is_address, remote_file
from workers.sandboxes.images.dockerfile.steps import CopyFiles, FromContext, FromStage, FromText, Source
from workers.sandboxes.images.dockerfile.variables import Expansion

_FLAGS = {
    "COPY": {"from", "chown", "chmod", "link", "exclude", "parents"},
    "ADD": {"chown", "chmod", "link", "exclude", "checksum", "unpack", "keep-git-dir"},
}


@dataclass(frozen=True, slots=True)
class CopyPlanner:
    """Plans one COPY or ADD. `in_stage` finds a path in a named stage or image, `path` makes a target absolute.

    Raises ValueError and ImageError for sources that cannot be copied.
    """

    instruction: Instruction
    expansion: Expansion
    context: BuildContext
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
        found = [one for source in sources for one in self._found(source, len(sources), excluded)]
        parents = self.instruction.switch("parents")
        into = target.endswith(("/", "/.", "/..")) or target in (".", "..") or target == ""
        if not found:
            # patterns are for files that may be absent, such as the lock file of `COPY package.json yarn.lock* ./`
            return None
        if len(found) > 1 and not into and not parents:
            raise ValueError(f"several sources go into a folder: write {target}/")
        mode = self._value(self.instruction.flag("chmod") or "")
        return CopyFiles(
            tuple(found),
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

    def _found(self, source: str, n_sources: int, excluded: Sequence[str]) -> Sequence[Source]:
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
        return [FromContext(name, tuple(files), digest_of(files)) for name, files in trees if files]

    def _named(self, source: str) -> list[str]:
        names = self.context.named(source)
        if not names and not is_pattern(source):
            raise ValueError(f"{source} is not in the context {self.context.folder}, or .dockerignore leaves it out")
        return names

    def _with_parents(self, source: str, excluded: Patterns) -> list[Source]:
        """Return the folders below which a source's paths are kept, each with its matching files."""
        pivot, mark, inside = source.partition("/./")
        if not mark:
            pivot, inside = ".", source
        wanted = glob_pattern(posixpath.normpath("/" + inside).lstrip("/"))
        result: list[Source] = []
        for name in self._named(pivot):
            tree = _kept(name, self.context.tree(name), excluded)
            files = _matching(tree, wanted.fullmatch) if wanted.pattern else tree
            if files:
                result.append(FromContext(name, tuple(files), digest_of(files)))
        if not result and not is_pattern(source):
            raise ValueError(f"{source} is not in the context {self.context.folder}, or .dockerignore leaves it out")
        return result


def _kept(name: str, files: Sequence[ContextFile], excluded: Patterns) -> list[ContextFile]:
    """Return the files of a source that are not excluded, by their path below it, or its own name for itself."""
    if files and len(files) == 1 and name and not files[0].path.is_dir():
        return [] if ignores(excluded, posixpath.basename(name)) else list(files)
    return [file for file in files if not file.relative or not ignores(excluded, file.relative)]


def _matching(files: Sequence[ContextFile], wanted: Callable[[str], object]) -> list[ContextFile]:
    """Return the files that are wanted by their own path or a parent's, and the folders above them."""
    kept: set[str] = set()
    for file in files:
        parts = file.relative.split("/")
        above = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if file.relative and any(map(wanted, above)):
            kept.update(("", *above))
    return [file for file in files if file.relative in kept]
