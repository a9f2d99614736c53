"""OpenEnv, https://github.com/meta-pytorch/OpenEnv: an environment's server class, without its HTTP server.

`kwargs`: `environment` and `action` name the classes, as `module:Class`; `arguments` are for the constructor, `reset`
for `reset()`. Their package must be in the instance's `packages`. The policy acts by one tool, whose parameters are the
fields of the action; an action with a single text field may also be given as text.
"""

from __future__ import annotations

import json
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from workers.environments.environment import Action, AskModel, Begin, Episode, Step


class OpenEnv:
    """One episode of an OpenEnv environment."""

    packages = (
        *("openenv-core==0.3.0", "fastapi==0.136.3", "starlette==1.10.0", "annotated-doc==0.0.7", "anyio==4.16.0"),
        *("pydantic==2.14.3", "pydantic_core==2.50.4", "annotated-types==0.8.0", "typing_extensions==4.16.0"),
        *("typing-inspection==0.4.5", "sniffio==1.3.1", "idna==3.20", "uvicorn==0.54.0", "click==8.5.1"),
        *("h11==0.16.0", "PyYAML==6.0.3", "requests==2.34.2", "urllib3==2.8.0", "certifi==2026.10.18"),
        *("charset-normalizer==3.5.2", "websockets==15.0.1", "httpx==0.28.1", "httpcore==1.0.9"),
    )
    without_dependencies = True
    # It may write files and start threads.
    shared = False
    modules = ("workers.environments.adapters.stand_ins",)
    imports = (*modules, "openenv.core.env_server")

    def __init__(self, ask: AskModel) -> None:
        self._environment: Any = None
        self._action: Any = None

    def reset(self, episode: Episode) -> Begin:
        options = episode.kwargs
        self._action = _named(options["action"])
        self._environment = _named(options["environment"])(**options.get("arguments", {}))
        reset = {"seed": episode.seed, **options.get("reset", {})}
        # The template's reset() has no parameters; OpenEnv's own server passes only those that a method accepts.
        takes = signature(self._environment.reset).parameters
        if not any(each.kind is Parameter.VAR_KEYWORD for each in takes.values()):
            reset = {name: value for name, value in reset.items() if name in takes}
        observation = self._environment.reset(**reset)
        schema = self._action.model_json_schema()
        schema["properties"].pop("metadata", None)
        function = {"name": "act", "description": (self._action.__doc__ or "").strip(), "parameters": schema}
        tool = {"type": "function", "function": function}
        return Begin([*episode.messages, {"role": "user", "content": _shown(observation)}], [tool])

    def step(self, action: Action) -> Step:
        if not action.tool_calls:
            names = [name for name in self._action.model_fields if name != "metadata"]
            return self._acted({names[0]: action.text} if len(names) == 1 else {}, {"role": "user"})
        # One step has one action; a list of calls would be several steps with one reward.
        first, *rest = ({"role": "tool", "tool_call_id": each.call_id} for each in action.tool_calls)
        step = self._acted(action.tool_calls[0].arguments, first)
        refused = [{**each, "content": "Only the first call of a turn is carried out."} for each in rest]
        return Step([*step.messages, *refused], step.reward, step.terminated, info=step.info)

    def close(self) -> float | None:
        self._environment.close()
        return None

    def _acted(self, fields: dict[str, Any], message: dict[str, str]) -> Step:
        try:
            # Metadata is for the server, not for the policy.
            action = self._action(**{name: value for name, value in fields.items() if name != "metadata"})
        except ValueError as error:
            return Step([{**message, "content": f"This is no action: {error}"}])
        observation = self._environment.step(action)
        content = {**message, "content": _shown(observation)}
        return Step([content], float(observation.reward or 0.0), bool(observation.done))


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _shown(observation: Any) -> str:
    """Return an observation as JSON, without fields that the policy must not see."""
    return json.dumps(observation.model_dump(mode="json", exclude={"reward", "done", "metadata"}))
