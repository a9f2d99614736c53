"""Agents of the Node package index: Claude Code, Codex, opencode, Qwen Code, Gemini CLI.

They learn the rollout's limits only by settings of their own; the gateway enforces the limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from workers.agents.harness import Harness, HarnessAgent, Task
from workers.agents.presets.preset_parts import STATE, native, npm, on_node, text

_CLAUDE_OUTPUT_TOKENS = 32_000
"""Its default maximum of output tokens."""

CLAUDE_CODE = Harness(
    name="claude-code",
    programs=npm("claude-code"),
    command=lambda task: native(
        "claude-code",
        "@anthropic-ai/claude-code-linux-*/claude",
        "-p",
        "--dangerously-skip-permissions",
        "--max-turns",
        str(task.limits.max_turns),
    ),
    stdin=text,
    environment=lambda task: {
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(task.max_output_tokens, _CLAUDE_OUTPUT_TOKENS)),
        "CLAUDE_CONFIG_DIR": STATE,
        # Otherwise it refuses to act without confirmation as root.
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    },
)


def _codex_files(task: Task) -> Mapping[str, str]:
    provider = {
        "name": "farm",
        "base_url": f"{task.base_url}/v1",
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    lines = [
        f"model = {json.dumps(task.model)}",
        'model_provider = "farm"',
        *([] if task.context_tokens is None else [f"model_context_window = {task.context_tokens}"]),
        "check_for_update_on_startup = false",
        "[model_providers.farm]",
        *(f"{name} = {json.dumps(value)}" for name, value in provider.items()),
    ]
    return {f"{STATE}/config.toml": "\n".join(lines) + "\n"}


CODEX = Harness(
    name="codex",
    programs=npm("codex"),
    command=lambda task: native(
        "codex",
        "@openai/codex-linux-*/vendor/*/bin/codex",
        "exec",
        "--dangerously-bypass-approvals-and-sandbox",
        "--skip-git-repo-check",
        "-",
    ),
    stdin=text,
    files=_codex_files,
    environment={"CODEX_HOME": STATE},
)


def _opencode_limit(task: Task) -> Mapping[str, Mapping[str, int]]:
    """Return the token limits; none if the context is unknown, as the program requires both numbers."""
    if task.context_tokens is None:
        return {}
    return {"limit": {"context": task.context_tokens, "output": task.max_output_tokens}}


def _opencode_files(task: Task) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "farm",
        "options": {"baseURL": f"{task.base_url}/v1", "apiKey": task.key},
        "models": {task.model: {"name": task.model, **_opencode_limit(task)}},
    }
    config = {"provider": {"farm": provider}, "model": f"farm/{task.model}", "autoupdate": False, "share": "disabled"}
    return {f"{STATE}/opencode.json": json.dumps(config)}


OPENCODE = Harness(
    name="opencode",
    programs=npm("opencode"),
    command=lambda task: native("opencode", "opencode-linux-*/bin/opencode", "run"),
    stdin=text,
    files=_opencode_files,
    environment={
        "OPENCODE_CONFIG": f"{STATE}/opencode.json",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        **{f"XDG_{kind}_HOME": f"{STATE}/{kind.lower()}" for kind in ("DATA", "CONFIG", "STATE", "CACHE")},
    },
)

QWEN_CODE = Harness(
    name="qwen-code",
    programs=npm("qwen-code"),
    command=lambda task: on_node("qwen-code", "@qwen-code/qwen-code/cli.js", "--auth-type", "openai", "--yolo"),
    stdin=text,
    environment=lambda task: {
        "OPENAI_MODEL": task.model,
        "QWEN_HOME": STATE,
        "QWEN_CODE_DISABLE_TELEMETRY": "1",
    },
)

GEMINI_CLI = Harness(
    name="gemini-cli",
    programs=npm("gemini-cli"),
    command=lambda task: on_node("gemini-cli", "@google/gemini-cli/bundle/gemini.js", "--yolo", "-m", task.model),
    stdin=text,
    files=lambda task: {
        f"{STATE}/.gemini/settings.json": json.dumps(
            {
                "security": {"auth": {"selectedType": "gemini-api-key"}},
                "privacy": {"usageStatisticsEnabled": False},
                "general": {"disableAutoUpdate": True},
            }
        )
    },
    environment={"GEMINI_CLI_HOME": STATE, "GEMINI_CLI_TRUST_WORKSPACE": "true"},
)

claude_code = partial(HarnessAgent, CLAUDE_CODE)
codex = partial(HarnessAgent, CODEX)
opencode = partial(HarnessAgent, OPENCODE)
qwen_code = partial(HarnessAgent, QWEN_CODE)
gemini_cli = partial(HarnessAgent, GEMINI_CLI)
