"""The common parts of presets: locks of their packages, their programs, and their start commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from farm.records.sandbox_spec import AgentProgram
from workers.agents.harness import Task
from workers.sandboxes.agent_programs.brought_programs import FOLDER
from workers.tools import terminal

STATE = "/tmp/farm-agent"  # noqa: S108  (of the sandbox, which is not shared)
"""The folder of an agent's own files, as those in the working folder may be scored."""
_HERE = Path(__file__).parent


def npm(name: str) -> tuple[AgentProgram, ...]:
    """Return the npm packages in the lock of this name."""
    return (AgentProgram(name=name, kind="npm", source=str(_HERE / "locks" / f"{name}.lock.json")),)


def pinned(name: str) -> tuple[str, ...]:
    """Return the exact requirements in the lock of this name, one per line."""
    return tuple((_HERE / "locks" / f"{name}.txt").read_text(encoding="utf-8").split())


def native(name: str, pattern: str, *words: str) -> Sequence[str]:
    """Return a command for a program in a package whose name ends with its platform: the first installed one."""
    script = f'for program in {FOLDER}/{name}/node_modules/{pattern}; do exec "$program" "$@"; done'
    return ["sh", "-c", script, name, *words]


def on_node(name: str, path: str, *words: str) -> Sequence[str]:
    """Return a command for a program that is run by the Node next to it."""
    return [*native(name, "node-linux-*/bin/node"), f"{FOLDER}/{name}/node_modules/{path}", *words]


def program(name: str) -> Mapping[str, str]:
    """Return a program of this folder as a file of the sandbox."""
    return {f"{STATE}/{name}.py": (_HERE / "programs" / f"{name}.py").read_text(encoding="utf-8")}


def screen() -> Mapping[str, str]:
    """Return, for programs, the module that renders a command's output like a terminal, under its own name."""
    parts = terminal.__name__.split(".")
    # The sandbox's package of that name is another one.
    packages = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    modules = {f"{STATE}/{package}/__init__.py": "" for package in packages}
    source = Path(terminal.__path__[0], "screen.py").read_text(encoding="utf-8")
    return {**modules, f"{STATE}/{packages[-1]}/screen.py": source}


def text(task: Task) -> str:
    """Return the task unchanged."""
    return task.text
