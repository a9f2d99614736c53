"""mini-swe-agent, from the package index, as it is: it works in the sandbox by a bash of its own.

https://mini-swe-agent.com. It and the client it speaks by are exact releases; what else they depend on is resolved
when a node installs them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from farm.rollout import Outcome
from workers.agents.harness import Harness, HarnessAgent, Task
from workers.interfaces import AgentResult
from workers.sandboxes.environments import AGENT_FOLDER

_FOLDER = "/tmp/mini-swe-agent"  # noqa: S108  (of the sandbox, which nobody shares)
_CONFIG = f"{_FOLDER}/task.yaml"
_TRAJECTORY = f"{_FOLDER}/trajectory.json"
_OUTCOMES = {
    "Submitted": Outcome.SUBMITTED,
    # answers in a row without a call that it can run
    "RepeatedFormatError": Outcome.INVALID_ACTION,
}


def _command(task: Task) -> Sequence[str]:
    program = [f"{AGENT_FOLDER}/bin/python", "-m", "minisweagent.run.mini"]
    # the plain agent: the one that it starts otherwise talks to a person
    return [*program, "--agent-class", "default", "-c", "mini.yaml", "-c", _CONFIG, "-o", _TRAJECTORY]


def _files(task: Task) -> Mapping[str, str]:
    """Its configuration, over that which it brings; JSON is YAML."""
    config = {
        "run": {"task": task.text},
        # the rollout has limits of its own, and there are no prices
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
    # with a tool in a request, newer releases of litellm import a package that they do not ask for; this one knows
    # no newer openai
    packages=("mini-swe-agent==2.4.6", "litellm==1.80.5", "openai==2.8.1"),
    command=_command,
    files=_files,
    environment={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": _FOLDER,
        # else it tries for seconds to fetch a list of prices
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    output=_TRAJECTORY,
    read=_read,
)


def mini_swe_agent() -> HarnessAgent:
    """The agent, as an entry point gives it."""
    return HarnessAgent(MINI_SWE_AGENT)
