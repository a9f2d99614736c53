"""The scripted engine: vLLM's wire for token ids, with a script or random weights behind it.

A double for trying the farm without a GPU; it identifies itself as such. Like a real engine it can be slow, paused and
given new weights. It shares no code with the parts of the farm that it tests.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.model_text import make_tokenizer, write_model_text
from workers.testing.engine.scheduler import (
    BLOCK_TOKENS,
    CACHE_TOKENS,
    UNLIMITED,
    PrefixCache,
    Scheduler,
    SimulatedSpeed,
)
from workers.testing.engine.simulated_values import ExpertRouting
from workers.testing.engine.turn_sources import RandomTurns, ScriptTurns
from workers.testing.engine.vllm.control import VllmControlEndpoints
from workers.testing.engine.vllm.sampling import SamplingEndpoints, error_response
from workers.testing.engine.vocabulary import Vocabulary
from workers.testing.engine.web import ClientGone, RequestRefused
from workers.testing.scripted_model import Script

MODEL = "scripted-test-double"


class ScriptedEngine:
    """One engine. `app()` is served by `workers.testing.serving`; its controls may be used from any thread.

    Without a script it samples random turns of `mean_tokens`. `model_text` is the folder for its tokenizer, reported as
    `root`; None creates a temporary one. `tokens_per_s` is the speed of one call, `prefill_per_s` counts prompt tokens
    not in its prefix cache; 0 means no limit. `max_running` calls sample at once, the others queue; beyond `max_queued`
    they are refused. A chunk of a stream has `stream_tokens` ids. With `experts` it reports routed experts, as vLLM
    does with `--enable-return-routed-experts`.
    """

    machine_type: ClassVar[type[Machine]] = Machine

    def __init__(
        self,
        script: Script | None = None,
        *,
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
        stream_tokens: int = 4,
        experts: ExpertRouting | None = None,
    ) -> None:
        self.root = model_text or self._own_folder()
        write_model_text(self.root)
        vocabulary = Vocabulary(make_tokenizer())
        self.scheduler = Scheduler(
            SimulatedSpeed(latency_s, prefill_per_s, tokens_per_s, max_running, max_queued),
            PrefixCache(block_tokens, cache_tokens),
            weight_version,
        )
        self.machine = self.machine_type(
            vocabulary,
            ScriptTurns(vocabulary, script)
            if script is not None
            else RandomTurns(vocabulary, seed=seed, mean_tokens=mean_tokens),
            self.scheduler,
            name=model,
            root=self.root,
            context_tokens=context_tokens,
            seed=seed,
            experts=experts,
        )
        self.stream_tokens = stream_tokens

    def app(self) -> Starlette:
        """Return its web application."""
        return Starlette(
            routes=self.routes(),
            exception_handlers={RequestRefused: self._refuse, ClientGone: _nobody_there},
        )

    def routes(self) -> Sequence[Route]:
        """Return the routes of its wire."""
        sampling = SamplingEndpoints(self.machine, stream_tokens=self.stream_tokens)
        return [*sampling.routes(), *VllmControlEndpoints(self.machine).routes()]

    def error(self, refused: RequestRefused) -> Response:
        """Return a refusal in the form of its wire."""
        return error_response(refused)

    @property
    def healthy(self) -> bool:
        return self.machine.healthy

    @healthy.setter
    def healthy(self, value: bool) -> None:
        self.machine.healthy = value

    @property
    def n_running(self) -> int:
        """Number of sampling calls; `n_waiting` counts those that wait for a slot or the end of a pause."""
        return len(self.scheduler.running)

    @property
    def n_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def n_started(self) -> int:
        return self.scheduler.n_started

    @property
    def n_cancelled(self) -> int:
        """Number of calls whose client disconnected before their end."""
        return self.scheduler.n_cancelled

    @property
    def n_tokens(self) -> int:
        """Number of tokens sampled in all calls."""
        return self.scheduler.n_tokens

    @property
    def n_prefix_queries(self) -> int:
        """Number of prompt tokens looked up in the prefix cache; `n_prefix_hits` of them were cached."""
        return self.scheduler.cache.n_queries

    @property
    def n_prefix_hits(self) -> int:
        return self.scheduler.cache.n_hits

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        return self.error(error)

    def _own_folder(self) -> Path:
        folder = tempfile.mkdtemp(prefix="farm-double-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
