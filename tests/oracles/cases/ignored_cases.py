"""Tasks with files of tests and solutions that `.harborignore` files omit or keep: always the same."""

from __future__ import annotations

import random
from collections.abc import Mapping

N = 150
"""Number of generated tasks."""
FOLDERS = ("tests", "solution", "steps/a/tests", "steps/a/solution")
_STEPPED = {"task.toml": '[[steps]]\nname = "a"\n', "steps/a/instruction.md": "Do.\n"}
_FILES = (
    *("test.sh", "solve.sh", "notes.md", "data/x.bin", "data/keep.bin", "data/deep/x.bin", "data/deep/notes.md"),
    *("__pycache__/a.pyc", "#odd", " space.txt", "build", "lib/build/out.o", "tests/helper.py", "!mark", "a[1].txt"),
)
_PATTERNS = (
    *("*.bin", "*.md", "!keep.bin", "data/", "!data/", "data/*", "!data/deep", "/data", "deep/", "data/**"),
    *("__pycache__/", "*.py[co]", "# notes.md", "\\#odd", "\\!mark", " space.txt", "build", "build/", "!build"),
    *(
        "",
        "   ",
        "**/deep/*.md",
        "**/x.bin",
        "data/**/x.bin",
        "*",
        "!*.sh",
        "!/test.sh",
        "tests/",
        "/tests",
        "a\\[1].txt",
        "[!a]*",
    ),
    *("notes.md ", "notes.md\\ ", "d?ta/x.bin", "/*/deep", "lib/**/out.o", ".harborignore", "data", "./data"),
    *("/build", "solve.sh"),
)


def ignored_cases() -> Mapping[str, dict[str, str | None]]:
    """Return the files of each task by its name."""
    draw = random.Random(7)
    result = {f"drawn {number}": _drawn(draw) for number in range(N)}
    result["a pattern of nothing"] = {"tests/.harborignore": "!\n"}
    result["of the task"] = {"tests/notes.md": "", ".harborignore": "*.md\n"}
    result["of a step"] = {**_STEPPED, "steps/a/tests/notes.md": "", "steps/a/.harborignore": "*.md\n"}
    result["of the environment"] = {"tests/notes.md": "", "environment/.harborignore": "*\n"}
    result["lines of Windows"] = {"tests/notes.md": "", "tests/.harborignore": "*.md\r\n"}
    return result


def _drawn(draw: random.Random) -> dict[str, str | None]:
    files: dict[str, str | None] = dict(_STEPPED) if draw.random() < 0.5 else {}
    for folder in FOLDERS[: 4 if files else 2]:
        files |= {f"{folder}/{name}": "" for name in draw.sample(_FILES, 7)}
        for place in draw.sample(("", "", "data/", "data/deep/"), 2):
            patterns = draw.choices(_PATTERNS, k=draw.randint(1, 4))
            files[f"{folder}/{place}.harborignore"] = "".join(f"{pattern}\n" for pattern in patterns)
    return files
