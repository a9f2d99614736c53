"""mini-swe-agent, unmodified, from the package index: it works in the sandbox with its own bash.

https://mini-swe-agent.com. All packages are pinned, including dependencies: with a tool in a request, newer releases of
its client library, litellm, import a package that they do not declare.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial

from farm.records.rollout import Outcome
from workers.agents.harness import Harness, HarnessAgent, Task
from workers.agents.presets.preset_parts import STATE, pinned
from workers.plugins.interfaces import AgentResult
from workers.sandboxes.images.environments import AGENT_FOLDER

_CONFIG = f"{STATE}/task.yaml"
_TRAJECTORY = f"{STATE}/trajectory.json"
_OUTCOMES = {
    "Submitted": Outcome.SUBMITTED,
    # Several consecutive answers without a call that it can run.
    "RepeatedFormatError": Outcome.INVALID_ACTION,
}


def _command(task: Task) -> Sequence[str]:
    program = [f"{AGENT_FOLDER}/bin/python", "-m", "minisweagent.run.mini"]
    # The plain agent: the default one is interactive.
    return [*program, "--agent-class", "default", "-c", "mini.yaml", "-c", _CONFIG, "-o", _TRAJECTORY]


def _files(task: Task) -> Mapping[str, str]:
    config = {
        "run": {"task": task.text},
        # The rollout has its own limits, and there are no prices.
        "agent": {"step_limit": 0, "cost_limit": 0.0},
        "model": {"model_class": "litellm", "model_name": "openai/policy", "cost_tracking": "ignore_errors"},
        "environment": {"timeout": max(1, int(task.limits.tool_s))},
    }
    return {_CONFIG: json.dumps(config)}


def _read(trajectory: str) -> AgentResult:
    info = json.loads(trajectory)["info"]
    status = info["exit_status"]
    if status not in _OUTCOMES:
        raise ValueError(f"it ended as {status!r}")
    return AgentResult(_OUTCOMES[status], info.get("submission") or None)


MINI_SWE_AGENT = Harness(
    name="mini-swe-agent",
    packages=pinned("mini-swe-agent"),
    command=_command,
    files=_files,
    environment={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": STATE,
        # Otherwise it tries for seconds to fetch a list of prices.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    output=_TRAJECTORY,
    read=_read,
)
mini_swe_agent = partial(HarnessAgent, MINI_SWE_AGENT)
