"""Artefacts of a task: the output of its collect hooks, copied from the sandbox into a separate verifier's sandbox.

Missing paths are skipped, as the policy did not create them. Patterns of `exclude` are those of `tar --exclude`: they
match a name, or the end of a path.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from farm.errors import SandboxError, ToolError
from farm.plugins import follows
from farm.records.submission import MAX_TREE_BYTES, MAX_TREE_FILES, SubmittedFile
from farm.tasks.harbor_config import ArtefactEntry, CollectHook
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.optional_protocols import HasUsers

log = logging.getLogger(__name__)

CONVENTION = ArtefactEntry(source="/logs/artifacts")
"""The folder that is an artefact of every task."""
REJECTED = "rejected"
"""In `Submission.files`: the reason why nothing was copied."""


class ArtefactsTooLarge(Exception):
    """The policy left more than can be kept with a rollout."""


def entries(of_task: Sequence[ArtefactEntry], of_step: Sequence[ArtefactEntry]) -> list[ArtefactEntry]:
    """Return the artefacts of a step, including the conventional folder unless it is listed."""
    named = [*of_task, *of_step]
    known = any(entry.source.rstrip("/") == CONVENTION.source for entry in named)
    return named if known else [CONVENTION, *named]


async def run_hooks(sandbox: Sandbox, hooks: Sequence[CollectHook]) -> None:
    """Run collect hooks as their users; as in Harbor, a failure does not stop the others."""
    for hook in hooks:
        try:
            user_sandbox = await asyncio.to_thread(_as_user, sandbox, hook)
        except SandboxError as error:
            log.warning("Sandbox %s: collect hook not run: %s", sandbox.sandbox_id, error)
            continue
        await user_sandbox.exec(["/bin/bash", "-c", hook.command], timeout_s=hook.timeout_sec)


def _as_user(sandbox: Sandbox, hook: CollectHook) -> Sandbox:
    """Return the sandbox as the hook's user, or the image's own user; as the agent's if it has no other users."""
    user = "" if hook.user is None else str(hook.user)
    return sandbox.as_user(user) if follows(sandbox, HasUsers) else sandbox


async def taken(sandbox: Sandbox, wanted: Sequence[ArtefactEntry]) -> dict[str, SubmittedFile]:
    """Return files by their path in the sandbox. Raises ArtefactsTooLarge."""
    tree: dict[str, SubmittedFile] = {}
    for number, entry in enumerate(wanted):
        with TemporaryDirectory(prefix="farm-artefacts-") as folder:
            target = Path(folder) / str(number)
            try:
                await sandbox.download(entry.source, target)
            except ToolError as error:
                if "arger than" in str(error) or "More than" in str(error):
                    raise ArtefactsTooLarge(str(error)) from error
                continue
            tree |= await asyncio.to_thread(_read, target, entry)
        n_bytes = sum(len(file.data) for file in tree.values())
        if n_bytes > MAX_TREE_BYTES or len(tree) > MAX_TREE_FILES:
            raise ArtefactsTooLarge(
                f"artefacts have {len(tree)} files of {n_bytes} bytes; {MAX_TREE_FILES} of {MAX_TREE_BYTES} are allowed"
            )
    return tree


def _read(top: Path, entry: ArtefactEntry) -> dict[str, SubmittedFile]:
    source = entry.source.rstrip("/")
    tree: dict[str, SubmittedFile] = {}
    left = MAX_TREE_BYTES
    for path in _paths(top, entry):
        relative = path.relative_to(top).as_posix()
        name = source if relative == "." else f"{source}/{relative}"
        if path.is_symlink():
            tree[name] = SubmittedFile(kind="link", target=str(path.readlink()))
        elif path.is_dir():
            tree[name] = SubmittedFile(kind="folder", mode=path.stat().st_mode & 0o777)
        else:
            left -= path.stat().st_size
            if left < 0:
                raise ArtefactsTooLarge(f"{entry.source} has more than {MAX_TREE_BYTES} bytes")
            tree[name] = SubmittedFile(data=path.read_bytes(), mode=path.stat().st_mode & 0o777)
    return tree


def _paths(top: Path, entry: ArtefactEntry) -> list[Path]:
    paths = [top]
    if top.is_dir() and not top.is_symlink():
        for folder, folders, files in os.walk(top):
            inside = Path(folder)
            folders[:] = [name for name in sorted(folders) if not excluded(inside / name, top, entry.exclude)]
            paths += [inside / name for name in folders]
            paths += [inside / name for name in sorted(files) if not excluded(inside / name, top, entry.exclude)]
    return paths


def excluded(path: Path, top: Path, patterns: Sequence[str]) -> bool:
    """Return whether a path below `top` is left out."""
    parts = path.relative_to(top).parts
    ends = ["/".join(parts[at:]) for at in range(len(parts))]
    return any(fnmatchcase(end, pattern.rstrip("/")) for pattern in patterns for end in ends)


async def put_artefacts(sandbox: Sandbox, tree: Mapping[str, SubmittedFile]) -> None:
    """Copy files to their original paths. Raises ToolError."""
    with TemporaryDirectory(prefix="farm-artefacts-") as folder:
        tops = await asyncio.to_thread(_written, tree, Path(folder))
        for source, path in tops:
            await sandbox.upload(source, path)


def _written(tree: Mapping[str, SubmittedFile], folder: Path) -> list[tuple[Path, str]]:
    """Write a tree below a folder of the node; return its topmost paths, each with its path in the sandbox."""
    for path, file in sorted(tree.items()):
        target = folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.kind == "link":
            target.symlink_to(file.target)
        elif file.kind == "folder":
            target.mkdir(exist_ok=True)
        else:
            target.write_bytes(file.data)
            target.chmod(file.mode | 0o600)
    for path, file in sorted(tree.items(), reverse=True):
        if file.kind == "folder":
            (folder / path.lstrip("/")).chmod(file.mode | 0o700)
    tops = [path for path in sorted(tree) if not any(str(above) in tree for above in Path(path).parents)]
    return [(folder / path.lstrip("/"), path) for path in tops]
