"""Text in vLLM's responses: tokens as text, log-probabilities in the form of OpenAI's endpoints, streamed text."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.scheduler import EngineRun
from workers.testing.engine.vllm.sampling import ResponseWriter


class TextResponseWriter(ResponseWriter):
    """Formats the ids [begin, end) of a run for completions and chat; `as_ids` writes each token as its id."""

    def __init__(self, machine: Machine, *, as_ids: bool = False) -> None:
        super().__init__(machine)
        self._as_ids = as_ids

    def tokens(self, run: EngineRun, begin: int, end: int) -> list[str]:
        ids: list[int] = run.ids[begin:end].tolist()
        if self._as_ids:
            return [f"token_id:{id_}" for id_ in ids]
        shown = self._machine.vocabulary.shown_as
        return [shown[id_] for id_ in ids]

    def of_completions(self, run: EngineRun, begin: int, end: int, offset: int = 0) -> dict[str, Any]:
        """Return the four lists; `offset` is the length of the text before."""
        tokens, values = self.tokens(run, begin, end), self.logprobs(run, begin, end)
        return {
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": [{token: value} for token, value in zip(tokens, values, strict=False)],
        }

    def of_chat(self, run: EngineRun, begin: int, end: int, n_top: int) -> dict[str, Any]:
        tokens, values = self.tokens(run, begin, end), self.logprobs(run, begin, end)
        shown = self._machine.vocabulary.shown_as
        whole = [
            {"token": token, "logprob": value, "bytes": list(shown[id_].encode())}
            for token, value, id_ in zip(tokens, values, run.ids[begin:end].tolist(), strict=False)
        ]
        return {"content": [{**one, "top_logprobs": [one] if n_top else []} for one in whole]}


class TextStream:
    """The growing text of a run; partial characters wait for their rest."""

    def __init__(self, machine: Machine, run: EngineRun) -> None:
        self._machine = machine
        self._run = run
        self._n_ids = 0
        self.text = ""

    def feed(self, end: int, *, last: bool) -> str:
        """Return the text that the ids up to `end` add."""
        more = self._machine.vocabulary.decode(self._run.ids[self._n_ids : end])
        if more.endswith("�") and not last:
            return ""
        self._n_ids = end
        before = self.text
        self.text = (before + more)[: self._run.plan.text_end]
        return self.text[len(before) :]
