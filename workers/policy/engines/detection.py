"""Finds out what an LLM server is and can do, by asking it for two tokens rather than by what its version promises."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from farm.engine import EngineInfo
from farm.errors import EngineError
from farm.request import SamplingParams
from farm.trajectory import token_ids
from workers.policy.engines import failures
from workers.policy.engines.connection import FAILURES, Connection, Refusal
from workers.policy.engines.control import VllmControl
from workers.policy.engines.served import open_engine
from workers.policy.generation import Engine, EngineAddress, EngineBusy, EngineRefused, EngineUnfit, Generation

Kind = Literal["vllm", "sglang", "openai"]
TokenIn = Literal["", "generate", "completions", "sglang"]

_WIRES: dict[Kind, tuple[TokenIn, ...]] = {
    "vllm": ("generate", "completions"),
    "sglang": ("sglang",),
    "openai": ("completions",),
}
_ADVICE = {
    "generate": "start vLLM with --enable-scale-out: its /inference/v1/generate tells every token's weight version",
    "completions": "it takes no token ids on /v1/completions: rollouts on it are text only and cannot be trained on",
    "sglang": "its /generate takes no token ids: rollouts on it are text only and cannot be trained on",
}
_DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1 to let the farm pause it and name its weights"
_CACHED = "start vLLM with --enable-prompt-tokens-details to see prefix-cache hits"
NO_VERSIONS = "its answers do not tell which weights sampled them; the fleet's version is taken"
_NO_LOGPROBS = "its chat gives no token ids with log-probabilities"
_ALL = 4
"""How many times as long as one answer all of them together may take."""
_TELLING = 0.01
"""How far the log-probability of one token must differ between two temperatures to depend on it."""


async def detect(address: EngineAddress, timeout_s: float = 10.0) -> EngineInfo:
    """What the engine is and can do. EngineError if it cannot be reached, is paused, or lists no such model."""
    try:
        # a server may give sign after sign of life, and never an answer
        async with asyncio.timeout(_ALL * timeout_s):
            return await _detected(address, timeout_s)
    except TimeoutError as error:
        raise failures.broken(address.url, error) from error


async def _detected(address: EngineAddress, timeout_s: float) -> EngineInfo:
    connection = Connection(address.url, address.key, timeout_s)
    try:
        found = await _identified(connection, address)
        if found.kind == "vllm":
            found.control = await _controllable(connection, address, found.notes)
    except Refusal as refusal:
        raise failures.refused(address.url, refusal.status, refusal.headers, refusal.body) from refusal
    except FAILURES as error:
        raise failures.broken(address.url, error) from error
    finally:
        await connection.aclose()
    await _try_wires(address, found, timeout_s)
    if not found.token_in:
        await _try_chat(address, found, timeout_s)
    return found.info()


@dataclass(slots=True)
class _Found:
    """An EngineInfo while it is found out."""

    kind: Kind = "openai"
    version: str = ""
    model: str = ""
    root: str = ""
    context_tokens: int | None = None
    token_in: TokenIn = ""
    token_out: bool = False
    logprobs: Literal["", "raw", "processed"] = ""
    control: bool = False
    notes: list[str] = field(default_factory=list)

    def info(self) -> EngineInfo:
        return EngineInfo(
            kind=self.kind,
            version=self.version,
            model=self.model,
            root=self.root,
            context_tokens=self.context_tokens,
            token_in=self.token_in,
            token_out=self.token_out,
            logprobs=self.logprobs,
            control=self.control,
            notes=tuple(self.notes),
        )


async def _identified(connection: Connection, address: EngineAddress) -> _Found:
    """By its list of models and the routes that only one kind has."""
    found = _Found(model=address.model)
    listed = await _models(connection)
    card = next((card for card in listed if card.get("id") == address.model), listed[0] if listed else {})
    found.model = str(card.get("id") or address.model)
    if address.model and listed and found.model != address.model:
        found.notes.append(f"it does not list {address.model}; it has {', '.join(str(c.get('id')) for c in listed)}")
        found.model = address.model
    if not found.model:
        raise EngineError(
            f"engine {address.url} lists no model; check the address (it ends in /v1), load a model or name one"
        )
    found.root = str(card.get("root") or "")
    length = card.get("max_model_len")
    found.context_tokens = length if isinstance(length, int) else None
    await _kind(connection, card, found)
    return found


async def _models(connection: Connection) -> list[dict[str, Any]]:
    """Some servers list none, or fail at it, and answer all the same. Refusal if they want a key, or send us away."""
    try:
        answer = await connection.get("/v1/models")
    except Refusal as refusal:
        if refusal.status in (401, 403) or 300 <= refusal.status < 400:
            raise
        return []
    data = answer.get("data") if isinstance(answer, dict) else None
    return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []


async def _kind(connection: Connection, card: dict[str, Any], found: _Found) -> None:
    sglang = await _optional(connection, "/model_info")
    if card.get("owned_by") == "sglang" or "model_path" in sglang:
        found.kind, found.control = "sglang", True
        found.root = str(sglang.get("model_path") or found.root)
        found.version = str((await _optional(connection, "/server_info")).get("version") or "")
    elif str(card.get("owned_by") or "").startswith("vllm"):
        found.kind = "vllm"
        found.version = str((await _optional(connection, "/version")).get("version") or "")


async def _optional(connection: Connection, path: str) -> dict[str, Any]:
    """What a route answers; empty if it has none or it is something else."""
    try:
        answer = await connection.get(path)
    except Refusal:
        return {}
    return answer if isinstance(answer, dict) else {}


async def _controllable(connection: Connection, address: EngineAddress, notes: list[str]) -> bool:
    try:
        paused = await VllmControl(connection, address.url).paused()
    except EngineError:
        notes.append(_DEV_MODE)
        return False
    if paused:
        raise EngineError(f"engine {address.url} is paused and samples nothing; resume it, then look at it again")
    return True


async def _try_wires(address: EngineAddress, found: _Found, timeout_s: float) -> None:
    """Take the first wire that gives a token for a token."""
    for wire in _WIRES[found.kind]:
        engine = open_engine(address, found.info().model_copy(update={"token_in": wire}), timeout_s=timeout_s)
        try:
            sampled = [await _greedy(engine, temperature) for temperature in (1.0, 0.5)]
        except (EngineRefused, failures.Unreadable) as error:
            if found.kind != "openai" and _unfit(error):
                raise
            found.notes.append(_ADVICE[wire])
            continue
        except EngineError as error:
            # Some plain servers answer 500 to ids; of the others it says that they are ill.
            if found.kind != "openai" or isinstance(error, EngineBusy):
                raise
            found.notes.append(_ADVICE[wire])
            continue
        finally:
            await engine.aclose()
        found.token_in, found.token_out = wire, True
        found.logprobs = _logprobs([_logprob(generation) for generation in sampled])
        if not sampled[0].versions:
            found.notes.append(NO_VERSIONS)
        if found.kind == "vllm" and sampled[0].n_cached_tokens is None:
            found.notes.append(_CACHED)
        return


def _unfit(error: EngineError) -> bool:
    """Whether it would answer neither this nor anything else: it wants another key, or has not the model."""
    return isinstance(error, EngineUnfit) and not isinstance(error, failures.NoRoute)


async def _greedy(engine: Engine, temperature: float) -> Generation:
    """The likeliest token, at a temperature that cannot change which it is."""
    return await engine.generate(token_ids([1]), SamplingParams(temperature=temperature, top_k=1), 1)


def _logprob(generation: Generation) -> float:
    logprobs = generation.response_logprobs
    return 0.0 if logprobs is None or not len(logprobs) else float(logprobs[0])


def _logprobs(of_one_token: list[float]) -> Literal["raw", "processed"]:
    """Before temperature and filters it is the same at all temperatures, and not 0 as of the only token left."""
    hot, cool = of_one_token
    return "processed" if abs(hot - cool) > _TELLING or hot == cool == 0.0 else "raw"


async def _try_chat(address: EngineAddress, found: _Found, timeout_s: float) -> None:
    engine = open_engine(address, found.info(), timeout_s=timeout_s)
    try:
        completion = await engine.chat([{"role": "user", "content": "Hi"}], [], SamplingParams(temperature=None), 1)
    except EngineBusy:
        raise
    except EngineError as error:
        if _unfit(error):
            raise
        found.notes.append(f"it does not chat either: {error}")
    else:
        found.token_out = completion.response_ids is not None
        if not found.token_out:
            found.notes.append(_NO_LOGPROBS)
    finally:
        await engine.aclose()
