"""GEM, https://github.com/axon-rl/gem: games, math and code with text as actions, in `\\boxed{...}`.

`id` is one of its ids, such as `game:GuessTheNumber-v0`, `kwargs` are those of `gem.make`. Of the ids of
reasoning-gym (`rg:`) and of math, code and qa sets the latter fetch data from the web.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from workers.environments.adapters.reasoning_gym import ReasoningGym
from workers.environments.environment import Action, AskModel, Begin, Episode, Step


class Gem:
    """One episode of an environment of GEM; what it observes is said to the policy as a user."""

    packages = ("gem-llm==0.1.0", *ReasoningGym.packages)
    without_dependencies = True
    rewards = (-1, 1)
    modules = ("workers.environments.adapters.reasoning_gym", *ReasoningGym.modules)
    imports = ("workers.environments.adapters.stand_ins", "gem.envs")

    def __init__(self, ask: AskModel) -> None:
        self._environment: Any = None

    def reset(self, episode: Episode) -> Begin:
        self._environment = import_module("gem").make(episode.id, **episode.kwargs)
        observation, _ = self._environment.reset(seed=episode.seed)
        return Begin([*episode.messages, {"role": "user", "content": observation}])

    def step(self, action: Action) -> Step:
        observation, reward, terminated, truncated, info = self._environment.step(action.text)
        return Step([{"role": "user", "content": observation}], reward, terminated, truncated, info)

    def close(self) -> float | None:
        return None
