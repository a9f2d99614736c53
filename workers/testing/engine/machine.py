"""The double without a wire: a vocabulary, a player, a scheduler and a cache, asked by whichever wire it speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from farm.trajectory import LogProbs, Message, TokenIds
from workers.testing.engine.asked import Asked, Refused
from workers.testing.engine.faults import Faults
from workers.testing.engine.logprobs import scored
from workers.testing.engine.players import Player
from workers.testing.engine.run import Plan, Run
from workers.testing.engine.scheduler import Scheduler
from workers.testing.engine.vocabulary import Vocabulary


class Machine:
    """One model: `name` and `root`, the folder that its text lies in; `context_tokens` is its window."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        player: Player,
        scheduler: Scheduler,
        faults: Faults,
        *,
        name: str,
        root: Path,
        context_tokens: int,
        seed: int = 0,
    ) -> None:
        self.vocabulary = vocabulary
        self.player = player
        self.scheduler = scheduler
        self.faults = faults
        self.name = name
        self.root = root
        self.context_tokens = context_tokens
        self.healthy = True
        self._seed = seed

    def run(self, asked: Asked, index: int = 0) -> Run:
        """A run that has not begun. Raises Refused where the prompt leaves no room."""
        self._check_room(asked.prompt)
        suffix = f"-{index}" if asked.n > 1 else ""
        extra_s = {"slow": self.faults.slow_s, "hang": inf}.get(asked.fault, 0.0)
        return Run(f"{asked.request_id}{suffix}", asked.prompt, self._plan(asked, index), asked.salt, extra_s)

    def prompt_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Messages as the chat template writes them. Raises Refused where it does not take them."""
        if not all(isinstance(message.get("role"), str) for message in messages):
            raise Refused("every message needs a role", kind="Bad Request", param="messages")
        try:
            return self.vocabulary.render(messages, tools or (), generation_prompt=generation_prompt, **(kwargs or {}))
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError) as error:
            raise Refused(f"The chat template refuses the messages: {error}") from None

    def sample(self, run: Run) -> AsyncIterator[int]:
        """As the scheduler does it. Raises Refused where its queue is full."""
        if self.scheduler.full:
            self.scheduler.n_rejected += 1
            raise Refused("The server is overloaded; please retry later.", status=503, kind="Service Unavailable")
        return self.scheduler.sample(run)

    def text(self, run: Run) -> str:
        """What was said so far, without special tokens, cut at the stop."""
        return self.vocabulary.decode(run.ids)[: run.plan.text_end if run.ended else None]

    def logprobs(self, run: Run, begin: int, end: int, temperature: float | None = None) -> LogProbs:
        """Of the run's ids [begin, end), each under the weights that sampled it."""
        ids = np.concatenate([run.prompt, run.ids])
        n_prompt = len(run.prompt)
        found = [
            scored(ids[: n_prompt + span.end], n_prompt + span.start, span.version, self._seed, temperature)
            for span in run.spans
        ]
        return np.concatenate([np.zeros(0, np.float32), *found])[begin:end]

    def seen(self, asked: Asked) -> TokenIds:
        """The prompt as the double says that it saw it."""
        if asked.fault != "echo" or not len(asked.prompt):
            return asked.prompt
        other = asked.prompt.copy()
        other[len(other) // 2] = (other[len(other) // 2] + 1) % self.vocabulary.n_plain
        return other

    def _check_room(self, prompt: TokenIds) -> None:
        if len(prompt) >= self.context_tokens:
            raise Refused(
                f"This model's maximum context length is {self.context_tokens} tokens. However, your prompt contains "
                f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                f"the length of the input prompt. (parameter=input_tokens, value={len(prompt)})",
                param="input_tokens",
            )

    def _plan(self, asked: Asked, index: int) -> Plan:
        room = self.context_tokens - len(asked.prompt)
        limit = room if asked.max_tokens is None else min(room, asked.max_tokens)
        ids = self.player.turn(asked.prompt, asked.seed_of(index))
        if asked.ignore_eos:
            ids = np.concatenate([ids, self._endless(asked.prompt, max(limit - len(ids), 0))])
        whole = not asked.ignore_eos and len(ids) <= limit
        plan = Plan(ids[:limit], "stop" if whole else "length")
        return self._stopped(asked, plan)

    def _endless(self, prompt: TokenIds, n: int) -> TokenIds:
        """What is sampled where nothing may end it."""
        draw = np.random.default_rng([self._seed, len(prompt)])
        return draw.integers(0, self.vocabulary.n_plain, n, np.int32)

    def _stopped(self, asked: Asked, plan: Plan) -> Plan:
        """The plan up to what the request wants to stop at."""
        ids = plan.ids
        if asked.stop_token_ids:
            found = np.flatnonzero(np.isin(ids, list(asked.stop_token_ids)))
            if len(found) and ids[found[0]] != self.vocabulary.end_id:
                n = int(found[0])
                plan = Plan(ids[: n + 1], "stop", int(ids[n]), len(self.vocabulary.decode(ids[:n])))
        text = self.vocabulary.decode(plan.ids) if asked.stop else ""
        hits = [(at, stop) for stop in asked.stop if (at := text.find(stop)) >= 0]
        if not hits:
            return plan
        at, stop = min(hits)
        return Plan(plan.ids[: self._reaches(plan.ids, at + len(stop))], "stop", stop, at)

    def _reaches(self, ids: TokenIds, n_characters: int) -> int:
        """How many ids it takes until their text has that many characters."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.vocabulary.decode(ids[:middle]).rstrip("�")) >= n_characters:
                high = middle
            else:
                low = middle + 1
        return low
