"""An environment that needs only Python: guess a number, with a hint and a small reward for each guess."""

from __future__ import annotations

import random
import re

from workers.environments.environment import Action, AskModel, Begin, Episode, Step


class GuessingGame:
    """Guess the number from 1 to `most`; a guess that narrows the range is worth 0.1, the right one 1."""

    def __init__(self, ask: AskModel) -> None:
        self._low, self._high = 1, 1
        self._number = 1

    def reset(self, episode: Episode) -> Begin:
        self._high = int(episode.kwargs.get("most", 10))
        self._number = random.randint(1, self._high)
        text = f"I think of a number from 1 to {self._high}. Guess it: write <guess>5</guess>."
        return Begin([*episode.messages, {"role": "user", "content": text}])

    def step(self, action: Action) -> Step:
        guesses = re.findall(r"<guess>(\d{1,9})</guess>", action.text, re.ASCII)
        if not guesses:
            return Step([{"role": "user", "content": "Write one guess, such as <guess>5</guess>."}])
        guess = int(guesses[-1])
        if guess == self._number:
            return Step(reward=1.0, terminated=True, info={"number": self._number})
        narrower = self._low <= guess <= self._high
        if guess < self._number:
            self._low, hint = max(self._low, guess + 1), "higher"
        else:
            self._high, hint = min(self._high, guess - 1), "lower"
        return Step([{"role": "user", "content": f"It is {hint}."}], reward=0.1 if narrower else 0.0)

    def close(self) -> float | None:
        return None
