"""Files that tests stand on: in a shared verification they are the image's own, whatever the policy made of them.

Harbor's shared mode runs the tests in the tree that the policy left. Programs, interpreters and what these load by
themselves could then be its own, and a reward of its choice. `docs/tasks/harbor.md` says what remains possible.
"""

from __future__ import annotations

from dataclasses import replace

from workers.handler_options import RestoredFiles

TASK_FOLDERS = RestoredFiles(trees=("/tests", "/logs", "/solution"))
"""The folders that are the task's in any case."""

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
_MODULES = ("pytest", "_pytest", "pluggy", "iniconfig", "py", "unittest", "xdist", "coverage", "pytest_cov")
_LOADERS = ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "ld-musl-x86_64.so.1", "ld-musl-aarch64.so.1")
_CORE = ("libc.so.6", "libdl.so.2", "libpthread.so.0", "libm.so.6", "libtinfo.so.6", "libreadline.so.8")
_CONFIGURATION = ("conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg", "setup.py")

GUARDED = replace(
    TASK_FOLDERS,
    # configuration at the top is that of every test below it, those in /tests among them
    files=("/etc/ld.so.preload", "/etc/bash.bashrc", "/etc/environment", *(f"/{name}" for name in _CONFIGURATION)),
    names=("sitecustomize.py", "usercustomize.py", "pytest.py", "_pytest.py"),
    programs=(*_SHELLS, *_INTERPRETERS, *_TEST_RUNNERS, *_TEXT, *_FILES),
    modules=_MODULES,
    libraries=(*_LOADERS, *_CORE),
)
"""All that is left out of the layer of a policy before tests run in it."""
