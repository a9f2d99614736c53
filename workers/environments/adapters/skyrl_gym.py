"""SkyRL-gym, https://github.com/NovaSky-AI/SkyRL: `id` is one of aime, gsm8k, gsm8k_multi_turn, lcb, text2sql and more.

`messages` are the row's prompt, `kwargs` its extras, with `reward_spec: {"ground_truth": ...}` among them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from workers.environments.environment import Action, AskModel, Begin, Episode, Step

_COMPUTING = frozenset({"aime", "gsm8k", "gsm8k_multi_turn"})


class SkyrlGym:
    """One episode of a SkyRL text environment that only computes a score."""

    packages = (
        *("skyrl-gym==0.4.0", "func_timeout==4.3.5", "pandas==3.1.1", "numpy==2.3.5", "requests==2.34.2"),
        *("omegaconf==2.4.0", "PyYAML==6.0.3", "python-dateutil==4.0.0", "six==1.17.0", "tzdata==2026.6"),
        *("pytz==2026.6", "urllib3==2.8.0", "charset-normalizer==3.5.2", "certifi==2026.10.18", "idna==3.20"),
        "antlr4-python3-runtime==4.9.3",
    )
    without_dependencies = True
    shared = True
    imports = ("skyrl_gym.envs",)

    def __init__(self, ask: AskModel) -> None:
        self._environment: Any = None

    def reset(self, episode: Episode) -> Begin:
        if type(self).shared and episode.id not in _COMPUTING:
            raise ValueError(f"{episode.id} runs the policy's code: use the environment skyrl_gym_code")
        extras = dict(episode.kwargs)
        if "ground_truth" not in extras.get("reward_spec", {}):
            raise ValueError("kwargs need reward_spec: {ground_truth}; in verl's rows it is named reward_model")
        self._environment = import_module("skyrl_gym").make(
            episode.id, env_config=extras.pop("env_config", {}), extras=extras
        )
        prompt, _ = self._environment.init([dict(each) for each in episode.messages])
        return Begin(prompt)

    def step(self, action: Action) -> Step:
        output = self._environment.step(action.text)
        return Step(output["observations"], output["reward"], output["done"], info=output["metadata"] or {})

    def close(self) -> float | None:
        self._environment.close()
        return None


class SkyrlGymCode(SkyrlGym):
    """The environments that run the policy's code or query a search engine: one sandbox per rollout."""

    shared = False
