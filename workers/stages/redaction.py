"""Redacts secrets: those of batches in all records, logs and policy inputs, those of the farm and its engines in its
own log and errors.

Literal values of at least six characters are replaced; replacing shorter ones would damage unrelated texts. Secrets
that a policy encodes, or writes to the files of its layer, are not recognised.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from farm.configuration.secret_values import secret_variables, without_credentials
from farm.errors import ToolError
from farm.records.submission import Submission
from farm.records.trajectory import ModelCall
from farm.settings import settings
from workers.plugins.interfaces import Artefact, Keep, Observation, Record, Tool

MIN_CHARS = 6
BLOT = "[secret]"


class Redactor:
    """Redacts the values of some secrets in texts, bytes and JSON; without secrets it changes nothing."""

    def __init__(self, secrets: Iterable[str]) -> None:
        # The longest first, as one secret may contain another.
        values = sorted({value for value in secrets if len(value) >= MIN_CHARS}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, values))) if values else None
        self._bytes = re.compile(b"|".join(re.escape(value.encode()) for value in values)) if values else None

    def __bool__(self) -> bool:
        return self._pattern is not None

    def text(self, text: str) -> str:
        return self._pattern.sub(BLOT, text) if self._pattern else text

    def data(self, data: bytes) -> bytes:
        return self._bytes.sub(BLOT.encode(), data) if self._bytes else data

    def json(self, value: Any) -> Any:
        """Return JSON with its texts redacted, including keys."""
        if not self:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.json(key): self.json(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(each) for each in value]
        return value

    def artefact(self, artefact: Artefact) -> Artefact:
        return Artefact(self.text(artefact.name), artefact.media_type, self.data(artefact.data))

    def submission(self, submission: Submission) -> Submission:
        if not self:
            return submission
        tree = {path: file.model_copy(update={"data": self.data(file.data)}) for path, file in submission.tree.items()}
        changed = {"answer": self.json(submission.answer), "files": self.json(submission.files), "tree": tree}
        return submission.model_copy(update=changed)

    def tool(self, tool: Tool) -> Tool:
        return cast(Tool, _RedactedTool(tool, self)) if self else tool

    def record(self, record: Record) -> Record:
        """Return a call recorder that redacts texts; token ids are recorded as sampled."""
        if not self:
            return record

        async def redacted(call: ModelCall) -> None:
            texts = {name: self.json(getattr(call, name)) for name in ("messages", "response", "observations", "tools")}
            await record(replace(call, **texts))

        return redacted

    def keep(self, keep: Keep) -> Keep:
        async def redacted(index: int, artefact: Artefact) -> str:
            return await keep(index, self.artefact(artefact))

        return redacted if self else keep


class _RedactedTool:
    """A tool whose observations and errors are redacted before the policy sees them."""

    def __init__(self, tool: Tool, redactor: Redactor) -> None:
        self._tool = tool
        self._redactor = redactor
        self.name = tool.name
        self.description = tool.description
        self.arguments = tool.arguments

    async def call(self, arguments: Any, timeout_s: float) -> Observation:
        try:
            observation = await self._tool.call(arguments, timeout_s)
        except ToolError as complaint:
            raise ToolError(self._redactor.text(str(complaint))) from None
        return Observation(
            text=self._redactor.text(observation.text),
            done=observation.done,
            answer=observation.answer,
            artefacts=tuple(self._redactor.artefact(artefact) for artefact in observation.artefacts),
        )

    async def close(self) -> None:
        await self._tool.close()


class SecretsInUse:
    """All secrets of this process and of its current rollouts, for its log and its errors. Thread-safe."""

    def __init__(self, own: Callable[[], Iterable[str]] = tuple) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()
        self._own = own
        self._redactor: Redactor | None = None

    @contextmanager
    def held(self, secrets: Iterable[str]) -> Iterator[None]:
        """Redact them while the block runs."""
        values = Counter(secrets)
        if not values:
            yield
            return
        self._change(values)
        try:
            yield
        finally:
            self._change(Counter({value: -n for value, n in values.items()}))

    def add(self, secret: str) -> None:
        """Redact one for the rest of the process's life."""
        if secret not in self._values:
            self._change(Counter([secret]))

    def _change(self, more: Counter[str]) -> None:
        with self._lock:
            self._values.update(more)
            self._values = Counter({value: n for value, n in self._values.items() if n > 0})
            self._redactor = None

    def redacted(self, text: str) -> str:
        """Return a text without them, and without passwords in URLs and credentials of requests."""
        with self._lock:
            if self._redactor is None:
                self._redactor = Redactor((*self._values, *self._own()))
            redactor = self._redactor
        return without_credentials(redactor.text(text))


def _own_secrets() -> Iterator[str]:
    yield from settings().secrets
    yield from secret_variables(os.environ)


in_use = SecretsInUse(_own_secrets)
