"""An environment of one step that gives 1 to one word, for the proof of environment servers. It runs in a sandbox."""

from __future__ import annotations

from workers.environments.environment import Action, AskModel, Begin, Episode, Step

RIGHT = "right"
WRONG = "wrong"


class KnownEnvironment:
    """One question, answered by `RIGHT`. It needs no packages."""

    rewards = (0, 1)

    def __init__(self, ask: AskModel) -> None:
        self._question = ""

    def reset(self, episode: Episode) -> Begin:
        self._question = f"Say {RIGHT!r}."
        return Begin([{"role": "user", "content": self._question}])

    def step(self, action: Action) -> Step:
        return Step(reward=float(action.text == RIGHT), terminated=True)

    def reference(self) -> str | None:
        return RIGHT

    def close(self) -> float | None:
        return None
