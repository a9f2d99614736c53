"""Detection of the kind and capabilities of an LLM server, by sampling two tokens rather than by its version."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Literal

from farm.errors import EngineError
from farm.records.engine import EngineInfo
from farm.records.request import SamplingParams
from farm.records.trajectory import token_ids
from workers.policy.engines import failures
from workers.policy.engines.client import open_engine
from workers.policy.engines.connection import FAILURES, EngineConnection, Refusal
from workers.policy.engines.kind import kind, kinds
from workers.policy.generation import (
    ChatRequest,
    Engine,
    EngineAddress,
    EngineBusy,
    EngineRefused,
    EngineUnfit,
    Generation,
)

log = logging.getLogger(__name__)

NO_VERSIONS = "its answers do not name the weights version; the farm's own is recorded"
_NO_LOGPROBS = "its chat gives no token ids with log-probabilities"
_ALL = 4
"""The time limit of a whole detection, in multiples of the limit of one request."""
_TELLING = 0.01
"""The smallest difference of a token's log-probability at two temperatures that counts as a dependence on them."""


async def detect(address: EngineAddress, timeout_s: float = 10.0) -> EngineInfo:
    """Return an engine's kind and capabilities. Raises EngineError if it is unreachable, paused, or has no model."""
    try:
        # A server may keep sending bytes and never complete an answer.
        async with asyncio.timeout(_ALL * timeout_s):
            return await _detected(address, timeout_s)
    except TimeoutError as error:
        raise failures.broken(address.url, error) from error


async def _detected(address: EngineAddress, timeout_s: float) -> EngineInfo:
    connection = EngineConnection(address.url, address.key, timeout_s)
    try:
        result = await _identified(connection, address)
    except Refusal as refusal:
        raise failures.refused(address.url, refusal.status, refusal.headers, refusal.body) from refusal
    except FAILURES as error:
        raise failures.broken(address.url, error) from error
    finally:
        await connection.aclose()
    await _try_wires(address, result, timeout_s)
    if not result.token_in:
        await _try_chat(address, result, timeout_s)
    return result.info()


@dataclass(slots=True)
class _Found:
    """An EngineInfo while it is being detected."""

    kind: str = ""
    version: str = ""
    model: str = ""
    root: str = ""
    context_tokens: int | None = None
    token_in: str = ""
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


async def _identified(connection: EngineConnection, address: EngineAddress) -> _Found:
    """Identify a server by its list of models, and by the first kind that recognises it."""
    result = _Found(model=address.model)
    listed = await _models(connection)
    card = next((card for card in listed if card.get("id") == address.model), listed[0] if listed else {})
    result.model = str(card.get("id") or address.model)
    if address.model and listed and result.model != address.model:
        result.notes.append(f"it does not list {address.model}; it has {', '.join(str(c.get('id')) for c in listed)}")
        result.model = address.model
    if not result.model:
        raise EngineError(
            f"engine {address.url} lists no model; check the address (it ends in /v1), load a model or name one"
        )
    result.root = str(card.get("root") or "")
    length = card.get("max_model_len")
    result.context_tokens = length if type(length) is int and 0 < length < 2**31 else None
    await _kind(connection, card, result)
    return result


async def _models(connection: EngineConnection) -> list[dict[str, Any]]:
    """Return the listed models, none if that fails. Raises Refusal for a wrong key, a redirect or a busy server."""
    try:
        answer = await connection.get("/v1/models")
    except Refusal as refusal:
        if refusal.is_busy or refusal.status in (401, 403) or 300 <= refusal.status < 400:
            raise
        return []
    data = answer.get("data") if isinstance(answer, dict) else None
    cards = data if isinstance(data, list) else []
    return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]


async def _kind(connection: EngineConnection, card: dict[str, Any], found: _Found) -> None:
    for name, engine_kind in kinds():
        try:
            identity = await engine_kind.identify(connection, card)
        except (Refusal, EngineError, *FAILURES):
            raise
        except Exception:
            log.exception("Probe of engine kind %s failed at %s; trying other kinds", name, connection.url)
            continue
        if identity is not None:
            found.kind, found.version, found.control = name, identity.version, identity.control
            found.root = identity.root or found.root
            found.context_tokens = identity.context_tokens or found.context_tokens
            found.notes += identity.notes
            return


async def _try_wires(address: EngineAddress, found: _Found, timeout_s: float) -> None:
    """Choose the first wire that answers token ids with token ids."""
    engine_kind = kind(found.kind)
    for wire in engine_kind.wires(found.info()):
        engine = open_engine(address, found.info().model_copy(update={"token_in": wire.name}), timeout_s=timeout_s)
        try:
            sampled = [await _greedy(engine, temperature) for temperature in (1.0, 0.5)]
        except (EngineRefused, failures.Unreadable) as error:
            if not engine_kind.is_fallback and _unfit(error):
                raise
            found.notes.append(wire.advice)
            continue
        except EngineError as error:
            # Some plain servers answer 500 to ids; with other kinds it is a failure of the server.
            if not engine_kind.is_fallback or isinstance(error, EngineBusy):
                raise
            found.notes.append(wire.advice)
            continue
        finally:
            await engine.aclose()
        found.token_in, found.token_out = wire.name, True
        found.logprobs = _logprobs([_logprob(generation) for generation in sampled])
        if not sampled[0].versions:
            found.notes.append(NO_VERSIONS)
        found.notes += engine_kind.remarks(sampled[0])
        return


def _unfit(error: EngineError) -> bool:
    """Return whether the server would refuse any request: it requires another key, or lacks the model."""
    return isinstance(error, EngineUnfit) and not isinstance(error, failures.NoRoute)


async def _greedy(engine: Engine, temperature: float) -> Generation:
    """Sample the likeliest token, which is the same at every temperature."""
    return await engine.generate(token_ids([1]), SamplingParams(temperature=temperature, top_k=1), 1)


def _logprob(generation: Generation) -> float:
    logprobs = generation.response_logprobs
    return 0.0 if logprobs is None or not len(logprobs) else float(logprobs[0])


def _logprobs(of_one_token: list[float]) -> Literal["raw", "processed"]:
    """Return `raw` if the log-probability is equal at both temperatures, and not the 0 of a single remaining token."""
    hot, cool = of_one_token
    return "processed" if abs(hot - cool) > _TELLING or hot == cool == 0.0 else "raw"


async def _try_chat(address: EngineAddress, found: _Found, timeout_s: float) -> None:
    engine = open_engine(address, found.info(), timeout_s=timeout_s)
    try:
        completion = await engine.chat(
            ChatRequest([{"role": "user", "content": "Hi"}], 1, SamplingParams(temperature=None))
        )
    except EngineBusy:
        raise
    except EngineError as error:
        if _unfit(error):
            raise
        found.notes.append(f"its chat fails, too: {error}")
    else:
        found.token_out = completion.response_ids is not None
        if not found.token_out:
            found.notes.append(_NO_LOGPROBS)
    finally:
        await engine.aclose()
