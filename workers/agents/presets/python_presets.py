"""Agents of the Python package index: aider and OpenHands, four libraries with a few lines each, and a bare shell.

Each library has one tool, `programs/shell_tool.py`. All packages are pinned, including dependencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from workers.agents.harness import Harness, HarnessAgent, Task
from workers.agents.presets.preset_parts import STATE, pinned, program, screen, text
from workers.sandboxes.images.environments import AGENT_FOLDER


def _limits(task: Task) -> Mapping[str, str]:
    """Return the rollout's limits as environment variables of the programs here."""
    turns, tool_s = str(task.limits.max_turns), f"{task.limits.tool_s:g}"
    most = str(task.max_output_tokens)
    return {"MODEL": task.model, "MAX_TURNS": turns, "MAX_OUTPUT_TOKENS": most, "TOOL_S": tool_s, "HOME": STATE}


def _library(name: str, **variables: str) -> Harness:
    file = f"{name.replace('-', '_')}_program"
    return Harness(
        name=name,
        packages=pinned(name),
        command=lambda task: [f"{AGENT_FOLDER}/bin/python", f"{STATE}/{file}.py"],
        stdin=text,
        files=lambda task: {**program(file), **program("shell_tool"), **screen()},
        environment=lambda task: {**_limits(task), **variables},
    )


OPENAI_AGENTS = _library("openai-agents", OPENAI_AGENTS_DISABLE_TRACING="1")
PYDANTIC_AI = _library("pydantic-ai")
LANGGRAPH = _library("langgraph", LANGSMITH_TRACING="false")
SMOLAGENTS = _library("smolagents", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

OPENHANDS = Harness(
    name="openhands",
    packages=pinned("openhands"),
    python="3.12",
    command=lambda task: [f"{AGENT_FOLDER}/bin/python", f"{STATE}/openhands_program.py"],
    stdin=text,
    files=lambda task: program("openhands_program"),
    environment=lambda task: {
        **_limits(task),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "OTEL_SDK_DISABLED": "true",
    },
)

TERMINAL = Harness(
    name="terminal",
    command=lambda task: ["python3", f"{STATE}/terminal_program.py"],
    stdin=text,
    files=lambda task: {**program("terminal_program"), **screen()},
    environment=_limits,
)


def _aider(task: Task) -> Sequence[str]:
    words = [
        *("--model", f"openai/{task.model}", "--edit-format", "udiff", "--message-file", f"{STATE}/task.txt"),
        *("--yes-always", "--no-auto-commits", "--no-gitignore", "--no-check-update", "--analytics-disable"),
        *("--no-show-model-warnings", "--no-show-release-notes", "--no-detect-urls", "--no-pretty", "--no-stream"),
        *("--chat-history-file", f"{STATE}/chat.md", "--input-history-file", f"{STATE}/input.txt"),
    ]
    return [f"{AGENT_FOLDER}/bin/python", "-m", "aider", *words]


AIDER = Harness(
    name="aider",
    packages=pinned("aider"),
    command=_aider,
    files=lambda task: {f"{STATE}/task.txt": task.text},
    environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": STATE},
)

openai_agents = partial(HarnessAgent, OPENAI_AGENTS)
pydantic_ai = partial(HarnessAgent, PYDANTIC_AI)
langgraph = partial(HarnessAgent, LANGGRAPH)
smolagents = partial(HarnessAgent, SMOLAGENTS)
openhands = partial(HarnessAgent, OPENHANDS)
terminal = partial(HarnessAgent, TERMINAL)
aider = partial(HarnessAgent, AIDER)
