"""GEM, https://github.com/axon-rl/gem: games, math and code with text as actions, in `\\boxed{...}`.

`id` is one of its ids, such as `game:GuessTheNumber-v0-easy`, `kwargs` are those of `gem.make`. The node verifies
answers to ids of reasoning-gym (`rg:`); ids of math, code and qa sets fetch data from the web. Word games need NLTK
data in the image.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from workers.environments.adapters.reasoning_gym import ReasoningGym
from workers.environments.adapters.word_data import PACKAGES, named_if_missing
from workers.environments.environment import Action, AskModel, Begin, Episode, PosedProblem, Step

_REASONING_GYM = "rg:"


class Gem:
    """One episode of a GEM environment; the policy gets its observations as user messages."""

    packages = ("gem-llm==0.1.0", *PACKAGES, *ReasoningGym.packages)
    without_dependencies = True
    rewards = (-1, 1)
    modules = (
        *("workers.environments.adapters.reasoning_gym", "workers.environments.adapters.word_data"),
        *ReasoningGym.modules,
    )
    imports = ("workers.environments.adapters.stand_ins", "gem.envs")

    def __init__(self, ask: AskModel) -> None:
        self._environment: Any = None

    def reset(self, episode: Episode) -> Begin:
        with named_if_missing(episode.id):
            self._environment = import_module("gem").make(episode.id, **episode.kwargs)
        observation, _ = self._environment.reset(seed=episode.seed)
        messages = [*episode.messages, {"role": "user", "content": observation}]
        if episode.id.startswith(_REASONING_GYM):
            return Begin(messages, problem=PosedProblem(self._environment.name, self._environment.data))
        return Begin(messages)

    def step(self, action: Action) -> Step:
        if self._environment.env_id.startswith(_REASONING_GYM):
            parsing = import_module("gem.utils.parsing")
            return Step(terminated=True, answer=parsing.extract_last_boxed_answer(action.text))
        observation, reward, terminated, truncated, info = self._environment.step(action.text)
        return Step([{"role": "user", "content": observation}], reward, terminated, truncated, info)

    def reference(self) -> str | None:
        answer = getattr(self._environment, "data", {}).get("answer")
        return None if answer is None else f"\\boxed{{{answer}}}"

    def close(self) -> float | None:
        return None
