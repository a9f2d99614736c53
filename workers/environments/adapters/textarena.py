"""TextArena's games for one player, https://github.com/LeonGuertler/TextArena: the reward comes at the end.

`id` is one of its ids, such as `GuessTheNumber-v0`, `kwargs` are those of `textarena.make`. Games of several players
need policies for the others, and are refused; word games need NLTK data in the image.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from workers.environments.adapters.word_data import PACKAGES, named_if_missing
from workers.environments.environment import Action, AskModel, Begin, ChatMessage, Episode, Step


class TextArena:
    """One game, with the policy as its only player."""

    packages = (
        *("textarena==0.7.4", "chess==1.11.2", "python-dotenv==1.2.4", "rich==15.0.0", *PACKAGES),
        *("markdown-it-py==4.3.0", "mdurl==0.1.2", "Pygments==2.21.0", "requests==2.34.2", "websockets==15.0.1"),
        *("openai==2.54.0", "pydantic==2.14.3", "pydantic_core==2.50.4", "annotated-types==0.8.0"),
        *("typing_extensions==4.16.0", "typing-inspection==0.4.5", "httpx==0.28.1", "httpcore==1.0.9", "anyio==4.16.0"),
        *("sniffio==1.3.1", "h11==0.16.0", "idna==3.20", "certifi==2026.10.18", "distro==1.9.0", "jiter==0.19.0"),
        *("urllib3==2.8.0", "charset-normalizer==3.5.2"),
    )
    without_dependencies = True
    rewards = (-1, 1)
    modules = ("workers.environments.adapters.word_data",)
    imports = ("textarena",)

    def __init__(self, ask: AskModel) -> None:
        self._environment: Any = None
        self._game: Any = None

    def reset(self, episode: Episode) -> Begin:
        with named_if_missing(episode.id):
            self._environment = import_module("textarena").make(episode.id, **episode.kwargs)
            self._environment.reset(num_players=1, seed=episode.seed)
        self._game = self._environment
        while hasattr(self._game, "env"):
            self._game = self._game.env
        return Begin([*episode.messages, *self._observed()])

    def step(self, action: Action) -> Step:
        done, info = self._environment.step(action.text)
        return Step([] if done else self._observed(), terminated=done, info=info or {})

    def close(self) -> float | None:
        rewards, _ = self._environment.close()
        # There is none before the game has ended.
        return float(rewards[0]) if rewards else None

    def _observed(self) -> list[ChatMessage]:
        """Return the new messages, without the policy's own; the game's wrappers would repeat everything."""
        _, observed = self._game.get_observation()
        return [{"role": "user", "content": "\n".join(str(text) for sender, text, *_ in observed if sender != 0)}]
