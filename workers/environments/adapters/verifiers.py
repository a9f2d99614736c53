"""verifiers (0.4, `verifiers.v1`), https://github.com/PrimeIntellect-ai/verifiers: a taskset's task, with one answer.

`kwargs`: `taskset` names the class, as `module:Class`, or an installed taskset's id; `config` are the taskset's
settings, `index` is the task's index. Its package must be in the instance's `packages`. The task's `@reward`s score the
answer, with verifiers' weights. Rewards that need a runtime are refused: run tasks of a harness in a sandbox with
verifiers' own environment server, see `docs/how-to/users/trainers/verifiers.md`.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from inspect import signature
from itertools import islice
from typing import Any

from workers.environments.environment import Action, AskModel, Begin, Episode, Step


class Verifiers:
    """One task of a taskset."""

    packages = (
        *("verifiers==0.4.0", "aiofiles==25.1.0", "aiohappyeyeballs==2.7.1", "aiohttp==3.14.5", "aiosignal==1.4.0"),
        *("annotated-types==0.8.0", "anthropic==2.12.0", "antlr4-python3-runtime==4.9.3", "anyio==4.16.0"),
        *("attrs==26.1.0", "certifi==2026.10.18", "cffi==2.1.1", "click==8.5.1", "connectrpc==0.11.1"),
        *("cryptography==50.0.2", "distro==1.9.0", "docstring_parser==0.18.0", "frozenlist==1.8.0", "gepa==0.1.4"),
        *("h11==0.16.0", "httpcore2==2.16.2", "httpcore==1.0.9", "httpx2==2.16.2", "httpx==0.28.1", "idna==3.20"),
        *("Jinja2==3.1.6", "jiter==0.19.0", "jsonschema-specifications==2025.9.1", "jsonschema==4.26.0"),
        *("latex2sympy2_extended==1.11.0", "loguru==0.7.3", "markdown-it-py==4.3.0", "MarkupSafe==3.0.4"),
        *("math-verify==0.9.0", "mcp-types==2.0.0", "mcp==2.0.0", "mdurl==0.1.2", "mpmath==1.3.0", "msgpack==1.2.4"),
        *("multidict==7.2.1", "numpy==2.3.5", "openai==2.54.0", "opentelemetry-api==1.45.2", "packaging==26.3"),
        *("prime-pydantic-config==0.4.3", "prime-runs==0.1.4", "prime-sandboxes==0.5.1", "prime-traces==0.0.10"),
        *("prime-tunnel==0.1.15", "propcache==0.5.4", "protobuf-py-ext==0.1.1", "protobuf-py==0.1.1"),
        *("protobuf==7.36.2", "psutil==7.2.2", "pycparser==3.12", "pydantic-settings==2.16.3", "pydantic==2.14.3"),
        *("pydantic_core==2.50.4", "Pygments==2.21.0", "PyJWT==2.15.1", "pyqwest==0.12.0", "python-dotenv==1.2.4"),
        *("python-multipart==0.0.34", "PyYAML==6.0.3", "pyzmq==27.3.0", "referencing==0.37.0", "renderers==0.1.12"),
        *("rich==15.0.0", "rpds-py==2026.9.1", "sniffio==1.3.1", "sse-starlette==3.7.0", "starlette==1.10.0"),
        *("sympy==1.14.0", "tenacity==9.2.1", "tomli==2.5.0", "tomli_w==1.2.0", "tqdm==4.70.1", "truststore==0.10.5"),
        *("typing-inspection==0.4.5", "typing_extensions==4.16.0", "uvicorn==0.54.0", "yarl==1.25.1"),
        "zstandard==0.25.0",
    )
    without_dependencies = True
    # Its rewards may evaluate the policy's text, and start threads and processes.
    shared = False
    imports = ("verifiers.v1",)

    def __init__(self, ask: AskModel) -> None:
        self._task: Any = None

    def reset(self, episode: Episode) -> Begin:
        self._task = _task(**episode.kwargs)
        data = self._task.data
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        prompt = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else _plain(data.prompt)
        return Begin([*episode.messages, *system, *prompt])

    def step(self, action: Action) -> Step:
        vf = import_module("verifiers.v1")
        types = import_module("verifiers.v1.types")
        wants = [each for each in self._task.hooks("reward") if _needs_runtime(each)]
        if wants:
            raise ValueError(f"{wants[0].__name__} needs a runtime: it scores a harness's work in a sandbox")
        data = self._task.data
        agent = vf.AgentInfo(config=vf.AgentConfig())
        trace = vf.Trace(task=vf.TraceTask(type=type(self._task).__name__, data=data), agent=agent)
        prompt = data.prompt_text
        trace.nodes.append(vf.MessageNode(message=types.UserMessage(content=prompt)))
        answer = types.AssistantMessage(content=action.text)
        trace.nodes.append(vf.MessageNode(parent=0, message=answer, sampled=True))
        asyncio.run(self._task.score(trace))
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return Step(reward=trace.reward, terminated=True, info={"rewards": parts, "metrics": dict(trace.metrics)})

    def close(self) -> float | None:
        return None


def _task(taskset: str, config: dict[str, Any] | None = None, index: int = 0) -> Any:
    loaders = import_module("verifiers.v1.utils.loaders")
    tasksets = import_module("verifiers.v1.taskset")
    module, _, name = taskset.partition(":")
    kind = getattr(import_module(module), name) if name else loaders.taskset_class(taskset)
    generic = import_module("verifiers.v1.utils.generic")
    settings = generic.concrete_type(kind, tasksets.TasksetConfig, origin=tasksets.Taskset) or tasksets.TasksetConfig
    task = next(islice(iter(kind(settings(**(config or {})))), index, None), None)
    if task is None:
        raise ValueError(f"taskset {taskset} has no task {index}")
    return task


def _plain(prompt: Any) -> list[dict[str, Any]]:
    return [{"role": each.role, "content": str(each.content)} for each in prompt or []]


def _needs_runtime(reward: Any) -> bool:
    parameter = signature(reward).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty
