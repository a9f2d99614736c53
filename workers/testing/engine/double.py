"""The scripted engine: vLLM or SGLang on the wire, a script or random weights behind it. It says that it is a double.

It is what the farm is tried with where there is no GPU, and the counterpart of its everyday tests. So it can be slow,
paused, cut and made to fail, as a real engine can; and it shares no code with what it tests.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.testing.book import PlayBook
from workers.testing.engine.asked import Refused
from workers.testing.engine.faults import Faults, NoSuchFault
from workers.testing.engine.machine import Machine
from workers.testing.engine.model_text import make_tokenizer, write_model_text
from workers.testing.engine.openai import OpenAIWire
from workers.testing.engine.players import BookPlayer, Mix, RandomPlayer
from workers.testing.engine.prefix_cache import BLOCK_TOKENS, CACHE_TOKENS, PrefixCache
from workers.testing.engine.scheduler import UNLIMITED, Scheduler, Speed
from workers.testing.engine.sglang.wire import SglangWire
from workers.testing.engine.vllm.wire import VllmWire
from workers.testing.engine.vocabulary import Vocabulary
from workers.testing.engine.web import ClientGone, Guarded, Json, Struck, body_of

MODEL = "scripted-test-double"
Wire = Literal["vllm", "sglang", "openai"]


class EngineDouble:
    """One engine. `app()` is served by `workers.testing.serving`; its controls may be used from any thread.

    With no book it plays random turns. `model_text` is the folder that it writes its tokenizer to and tells as `root`;
    None takes one of its own, which goes with it. `version` is vLLM's: before 0.33 calls wait during a pause, and
    completions and chat do not tell weight versions. `scale_out` and `control` are flags that a vLLM may lack.
    """

    def __init__(
        self,
        book: PlayBook | None = None,
        *,
        wire: Wire = "vllm",
        model: str = MODEL,
        model_text: Path | None = None,
        seed: int = 0,
        latency_s: float = 0.0,
        prefill_per_s: float = 0.0,
        tokens_per_s: float = 0.0,
        max_running: int = UNLIMITED,
        max_queued: int = UNLIMITED,
        context_tokens: int = 1_000_000,
        block_tokens: int = BLOCK_TOKENS,
        cache_tokens: int = CACHE_TOKENS,
        weight_version: str = "default",
        mean_tokens: int = 48,
        mix: Mix | None = None,
        faults: Mapping[str, float] | None = None,
        retry_after_s: float = 1.0,
        slow_s: float = 1.0,
        version: str = "0.33.0",
        scale_out: bool = True,
        control: bool = True,
        key: str = "",
        stream_tokens: int = 4,
    ) -> None:
        self.root = model_text or self._own_folder()
        write_model_text(self.root)
        vocabulary = Vocabulary(make_tokenizer())
        self.scheduler = Scheduler(
            Speed(latency_s, prefill_per_s, tokens_per_s, max_running, max_queued),
            PrefixCache(block_tokens, cache_tokens),
            weight_version,
        )
        self.faults = Faults(faults, seed=seed, retry_after_s=retry_after_s, slow_s=slow_s)
        self.machine = Machine(
            vocabulary,
            BookPlayer(vocabulary, book)
            if book is not None
            else RandomPlayer(vocabulary, seed=seed, mean_tokens=mean_tokens, mix=mix),
            self.scheduler,
            self.faults,
            name=model,
            root=self.root,
            context_tokens=context_tokens,
            seed=seed,
        )
        self._key = key
        self._wire = _wire(
            wire, self.machine, version=version, scale_out=scale_out, control=control, stream_tokens=stream_tokens
        )

    def app(self) -> Starlette:
        """Its faults need a server that gives it its connections, as `workers.testing.serving` does."""
        guard = [Middleware(Guarded, key=self._key)] if self._key else []
        struck = Middleware(Struck, faults=self.faults, paths=self._wire.paths, error=self._wire.error)
        return Starlette(
            routes=[*self._wire.routes(), Route("/double/faults", self._set_faults, methods=["POST"])],
            middleware=[*guard, struck],
            exception_handlers={Refused: self._refuse, NoSuchFault: self._refuse_fault, ClientGone: _nobody_there},
        )

    def fail_next(self, kind: str, n: int = 1) -> None:
        """Let a fault strike the next n calls that sample. Raises NoSuchFault."""
        self.faults.fail_next(kind, n)

    @property
    def healthy(self) -> bool:
        return self.machine.healthy

    @healthy.setter
    def healthy(self, value: bool) -> None:
        self.machine.healthy = value

    @property
    def n_running(self) -> int:
        """Calls that sample now; those that wait for a slot or for the end of a pause are `n_waiting`."""
        return len(self.scheduler.running)

    @property
    def n_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def n_started(self) -> int:
        return self.scheduler.n_started

    @property
    def n_cancelled(self) -> int:
        """Calls whose client went away before their end."""
        return self.scheduler.n_cancelled

    @property
    def n_tokens(self) -> int:
        """Sampled, over all calls."""
        return self.scheduler.n_tokens

    @property
    def n_prefix_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache, of which `n_prefix_hits` were there."""
        return self.scheduler.cache.n_queries

    @property
    def n_prefix_hits(self) -> int:
        return self.scheduler.cache.n_hits

    async def _set_faults(self, request: Request) -> Response:
        """`next` and `rates` by kind; `clear` takes all away first; `healthy`."""
        body = await body_of(request)
        if body.get("clear"):
            self.faults.clear()
        if "rates" in body:
            self.faults.set_rates(body["rates"])
        for kind, n in body.get("next", {}).items():
            self.faults.fail_next(kind, n)
        self.healthy = bool(body.get("healthy", self.healthy))
        return Json({"struck": dict(self.faults.n_struck), "healthy": self.healthy})

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return self._wire.error(error)

    async def _refuse_fault(self, request: Request, error: Exception) -> Response:
        return self._wire.error(Refused(str(error)))

    def _own_folder(self) -> Path:
        folder = tempfile.mkdtemp(prefix="farm-double-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


class _Wire(Protocol):
    """`paths` are those that faults strike."""

    paths: frozenset[str]

    def routes(self) -> list[Route]: ...

    def error(self, refused: Refused) -> Response: ...


def _wire(name: Wire, machine: Machine, *, version: str, scale_out: bool, control: bool, stream_tokens: int) -> _Wire:
    if name == "sglang":
        return SglangWire(machine, stream_tokens=stream_tokens)
    if name == "openai":
        return OpenAIWire(machine, stream_tokens=stream_tokens)
    return VllmWire(machine, version=version, scale_out=scale_out, control=control, stream_tokens=stream_tokens)
