"""Files on which tests depend: in a shared verification they are the image's own, whatever the policy changed.

Harbor's shared mode runs the tests in the policy's tree. Programs, interpreters and the files that these load
implicitly could then be the policy's, and so could the reward.
`docs/how-to/users/tasks/harbor.md` says what remains possible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from farm.tasks.harbor_instance import HarborInstance
from workers.plugins.handler import RestoredFiles

TASK_FOLDERS = RestoredFiles(trees=("/tests", "/logs", "/solution"))
"""The folders that belong to the task in any case."""

_SHELLS = ("sh", "bash", "dash", "ash", "busybox", "env", "su", "sudo", "runuser", "setpriv")
_INTERPRETERS = ("python", "perl", "ruby", "node", "java", "php", "lua", "R", "Rscript", "julia", "go", "deno", "bun")
_TEST_RUNNERS = ("pytest", "py.test", "pip", "uv", "uvx", "npm", "npx", "git", "make", "cargo", "jq", "curl", "wget")
_TEXT = (
    *("cat", "head", "tail", "grep", "egrep", "fgrep", "sed", "awk", "gawk", "mawk", "cut", "tr", "sort", "uniq", "wc"),
    *("diff", "cmp", "comm", "tee", "xargs", "echo", "printf", "expr", "bc", "seq", "test", "[", "true", "false"),
    *("base64", "md5sum", "sha1sum", "sha256sum", "sha512sum", "od", "xxd", "strings", "file"),
)
_FILES = (
    *("ls", "cp", "mv", "rm", "ln", "mkdir", "rmdir", "touch", "chmod", "chown", "stat", "find", "realpath", "which"),
    *("readlink", "basename", "dirname", "mktemp", "install", "tar", "gzip", "unzip", "df", "du", "id", "whoami"),
    *("date", "sleep", "timeout", "ps", "kill", "pkill", "killall", "nohup", "setsid", "stdbuf", "nproc", "uname"),
)
_CONFIGURATION = ("conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg", "setup.py")

GUARDED = replace(
    TASK_FOLDERS,
    # Configuration at the top applies to every test below it, including those in /tests.
    files=tuple(f"/{name}" for name in _CONFIGURATION),
    system=True,
    programs=(*_SHELLS, *_INTERPRETERS, *_TEST_RUNNERS, *_TEXT, *_FILES),
)
"""Everything removed from a policy's layer before tests run in it."""

_PATH = re.compile(r"(?:(?<![\w.~/$}])|(?<=~)|(?<=\$HOME)|(?<=\$\{HOME\}))/[\w.+@-]+(?:/[\w.+@-]+)*")
_MAX_READ = 1_000_000


def guarded(instance: HarborInstance, folders: Iterable[Path]) -> RestoredFiles:
    """Return the paths to remove from the layer of a task with these folders of tests. Blocks."""
    if instance.restore == "nothing":
        return TASK_FOLDERS
    texts = [*instance.instructions, instance.task.model_dump_json(exclude_unset=True), *instance.env.values()]
    for path in sorted(each for folder in folders for each in folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open(encoding="utf-8", errors="replace") as file:
                texts.append(file.read(_MAX_READ))
    return replace(GUARDED, named=tuple(sorted(named_paths(texts))), footprint=instance.footprint)


def named_paths(texts: Iterable[str]) -> set[str]:
    """Return the absolute paths in texts; a home given as `~` or `$HOME` is root's."""
    found = set()
    for text in texts:
        for match in _PATH.finditer(text):
            of_home = text[: match.start()].endswith(("~", "$HOME", "${HOME}"))
            found.add(("/root" if of_home else "") + match[0].rstrip("."))
    return found
