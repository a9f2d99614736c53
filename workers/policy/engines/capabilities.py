"""Detection of the kind and capabilities of an LLM server, by sampling two tokens rather than by its version."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

from farm.errors import EngineError
from farm.records.engine import EngineInfo
from farm.records.request import SamplingParams
from farm.records.trajectory import token_ids
from workers.policy.engines import failures
from workers.policy.engines.client import open_engine
from workers.policy.engines.connection import FAILURES, EngineConnection, Refusal
from workers.policy.engines.kind import Identity, kind, kinds
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
        info = await _identified(connection, address)
    except Refusal as refusal:
        raise failures.refused(address.url, refusal.status, refusal.headers, refusal.body) from refusal
    except FAILURES as error:
        raise failures.broken(address.url, error) from error
    finally:
        await connection.aclose()
    info = await _with_wire(address, info, timeout_s)
    return info if info.token_in else await _with_chat(address, info, timeout_s)


def _extended(info: EngineInfo, *notes: str, **fields: Any) -> EngineInfo:
    return info.model_copy(update={**fields, "notes": (*info.notes, *notes)})


async def _identified(connection: EngineConnection, address: EngineAddress) -> EngineInfo:
    """Identify a server by its list of models, and by the first kind that recognises it."""
    listed = await _models(connection)
    card = next((card for card in listed if card.get("id") == address.model), listed[0] if listed else {})
    model = str(card.get("id") or address.model)
    notes: list[str] = []
    if address.model and listed and model != address.model:
        notes.append(f"it does not list {address.model}; it has {', '.join(str(c.get('id')) for c in listed)}")
        model = address.model
    if not model:
        raise EngineError(
            f"engine {address.url} lists no model; check the address (it ends in /v1), load a model or name one"
        )
    length = card.get("max_model_len")
    context_tokens = length if type(length) is int and 0 < length < 2**31 else None
    name, identity = await _kind(connection, card)
    return EngineInfo(
        kind=name,
        version=identity.version,
        model=model,
        root=identity.root or str(card.get("root") or ""),
        context_tokens=identity.context_tokens or context_tokens,
        control=identity.control,
        notes=(*notes, *identity.notes),
    )


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


async def _kind(connection: EngineConnection, card: dict[str, Any]) -> tuple[str, Identity]:
    for name, engine_kind in kinds():
        try:
            identity = await engine_kind.identify(connection, card)
        except (Refusal, EngineError, *FAILURES):
            raise
        except Exception:
            log.exception("Probe of engine kind %s failed at %s; trying other kinds", name, connection.url)
            continue
        if identity is not None:
            return name, identity
    return "", Identity()


async def _with_wire(address: EngineAddress, info: EngineInfo, timeout_s: float) -> EngineInfo:
    """Choose the first wire that answers token ids with token ids."""
    engine_kind = kind(info.kind)
    for wire in engine_kind.wires(info):
        engine = open_engine(address, _extended(info, token_in=wire.name), timeout_s=timeout_s)
        try:
            sampled = [await _greedy(engine, temperature) for temperature in (1.0, 0.5)]
        except (EngineRefused, failures.Unreadable) as error:
            if not engine_kind.is_fallback and _unfit(error):
                raise
            info = _extended(info, wire.advice)
            continue
        except EngineError as error:
            # Some plain servers answer 500 to ids; with other kinds it is a failure of the server.
            if not engine_kind.is_fallback or isinstance(error, EngineBusy):
                raise
            info = _extended(info, wire.advice)
            continue
        finally:
            await engine.aclose()
        notes = (*(() if sampled[0].versions else (NO_VERSIONS,)), *engine_kind.remarks(sampled[0]))
        logprobs = _logprobs(sampled)
        return _extended(info, *notes, token_in=wire.name, token_out=True, logprobs=logprobs)
    return info


def _unfit(error: EngineError) -> bool:
    """Return whether the server would refuse any request: it requires another key, or lacks the model."""
    return isinstance(error, EngineUnfit) and not isinstance(error, failures.NoRoute)


async def _greedy(engine: Engine, temperature: float) -> Generation:
    """Sample the likeliest token, which is the same at every temperature."""
    return await engine.generate(token_ids([1]), SamplingParams(temperature=temperature, top_k=1), 1)


def _logprobs(sampled: list[Generation]) -> Literal["raw", "processed"]:
    """Return `raw` if the log-probability is equal at both temperatures, and not the 0 of a single remaining token."""
    per_sample = (generation.response_logprobs for generation in sampled)
    hot, cool = (0.0 if logprobs is None or not len(logprobs) else float(logprobs[0]) for logprobs in per_sample)
    return "processed" if abs(hot - cool) > _TELLING or hot == cool == 0.0 else "raw"


async def _with_chat(address: EngineAddress, info: EngineInfo, timeout_s: float) -> EngineInfo:
    engine = open_engine(address, info, timeout_s=timeout_s)
    try:
        completion = await engine.chat(
            ChatRequest([{"role": "user", "content": "Hi"}], 1, SamplingParams(temperature=None))
        )
    except EngineBusy:
        raise
    except EngineError as error:
        if _unfit(error):
            raise
        return _extended(info, f"its chat fails, too: {error}")
    finally:
        await engine.aclose()
    return _extended(info, token_out=True) if completion.response_ids is not None else _extended(info, _NO_LOGPROBS)
