"""Codex as shipped, except that it compacts its conversation at every turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from workers.agents.harness import HarnessAgent, Task
from workers.agents.presets.node_presets import CODEX


def _files(task: Task) -> Mapping[str, str]:
    return {path: f"model_auto_compact_token_limit = 100\n{text}" for path, text in CODEX.files(task).items()}


def codex_compacting() -> HarnessAgent:
    return HarnessAgent(replace(CODEX, name="codex-compacting", files=_files))
