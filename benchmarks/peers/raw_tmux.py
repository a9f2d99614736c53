"""A shell action as in many agent frameworks: `send-keys` to tmux, and `capture-pane` until a prompt appears.

After OpenHands, https://github.com/OpenHands/OpenHands, openhands/runtime/utils/bash.py: a prompt with the exit code,
the screen cleared before each command, and the pane polled every half second.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_S = 0.5
_CLEAR_S = 0.1
_PROMPT = "###PS1:0###"


class Tmux:
    """A tmux server with one pane, which runs a command that starts a bash."""

    def __init__(self, folder: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._socket = str(folder / "tmux")
        self._env = {**env, "TERM": "xterm", "LANG": "C.UTF-8"}
        self._tmux("new-session", "-d", "-x", "200", "-y", "50", shlex.join(command))
        self._tmux("send-keys", "PS1='###PS1:$?###'", "Enter")
        while not self._pane().rstrip().endswith(_PROMPT):
            time.sleep(0.05)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-f", "/dev/null", "-S", self._socket, *words],
            env=self._env,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def _pane(self) -> str:
        return self._tmux("capture-pane", "-J", "-p", "-S", "-")

    def run(self, command: str) -> str:
        """Run a command, and return the contents of the pane."""
        self._tmux("send-keys", "C-l")
        time.sleep(_CLEAR_S)
        self._tmux("clear-history")
        self._tmux("send-keys", command, "Enter")
        while True:
            time.sleep(POLL_S)
            pane = self._pane()
            if pane.rstrip().endswith(_PROMPT) and pane.count("###PS1:") >= 2:
                return pane

    def close(self) -> None:
        self._tmux("kill-server")
