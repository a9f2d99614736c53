"""The program in an answer: its last fenced block."""

from __future__ import annotations

from collections.abc import Sequence


def fenced_program(answer: str | None) -> str:
    """Return the last fenced block of an answer, of those marked as Python if there are any; empty without one."""
    blocks = _blocks(answer or "")
    python = [text for language, text in blocks if language in ("python", "python3", "py")]
    chosen: Sequence[str] = python or [text for language, text in blocks if not language]
    return chosen[-1] if chosen else ""


def _blocks(answer: str) -> list[tuple[str, str]]:
    result: list[tuple[str, str]] = []
    opened: tuple[str, list[str]] | None = None
    for line in answer.rpartition("</think>")[2].split("\n"):
        mark = line.strip()
        if opened is None and mark.startswith("```"):
            opened = (mark[3:].strip().lower(), [])
        elif opened is not None and mark == "```":
            result.append((opened[0], "\n".join(opened[1]) + "\n"))
            opened = None
        elif opened is not None:
            opened[1].append(line)
    return result
