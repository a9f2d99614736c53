"""The only tool of the library agents here: a command in the working folder."""

from __future__ import annotations

import os
import subprocess

from workers.tools.terminal.screen import drawn

_MOST = 20_000


def bash(command: str) -> str:
    """Run a command by bash in the working folder, and return what it prints.

    Args:
        command: The command.
    """
    limit_s = float(os.environ.get("TOOL_S", "60"))
    try:
        ended = subprocess.run(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return f"The command took longer than {limit_s:g} s and was ended."
    output, _ = drawn(ended.stdout.decode("utf-8", "replace"))
    if len(output) > _MOST:
        output = f"{output[: _MOST // 2]}\n[... {len(output) - _MOST} characters ...]\n{output[-_MOST // 2 :]}"
    return output + (f"\nexit code {ended.returncode}" if ended.returncode else "")
