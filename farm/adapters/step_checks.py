"""Checks of a trainer's step: one clear error, with the rollout and the option, before any training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from farm.errors import InvalidRequest
from farm.records.engine_state import ACTIVE, EngineState, serves
from farm.records.rollout import Rollout
from farm.records.trajectory import Segment


def check_engines(states: Sequence[EngineState], model: str = "") -> None:
    """Raise InvalidRequest if a rollout could use an engine without token ids, or engines with different tokenizers.

    Engines that are not probed yet or get no new rollouts are not checked.
    """
    probed = [(each.engine, each.engine.info) for each in states if each.engine.state == ACTIVE]
    taking = [
        (engine, info)
        for engine, info in probed
        if info is not None and serves(engine.model, model) and model in ("", engine.model, info.model)
    ]
    for engine, info in taking:
        if not info.token_out:
            notes = f" ({'; '.join(info.notes)})" if info.notes else ""
            raise InvalidRequest(
                f"the engine {engine.url} returns no token ids with log-probabilities{notes}, so its rollouts "
                "cannot train: remove it, or choose others by `model`",
                field="model",
            )
    tokenizers = {engine.tokenizer or info.model: engine.url for engine, info in taking}
    if len(tokenizers) > 1:
        named = ", ".join(f"{name} at {url}" for name, url in sorted(tokenizers.items()))
        raise InvalidRequest(f"one batch would use engines with several tokenizers: {named}", field="model")


def check_has_ids(rollouts: Iterable[Rollout]) -> None:
    """Raise InvalidRequest for a scored rollout whose engine returned no token ids: it has text, and no row."""
    for rollout in rollouts:
        if rollout.trainable and rollout.n_response_tokens and not rollout.segments:
            raise InvalidRequest(
                f"rollout {rollout.rollout_id} was scored, but has no training row: its engine gave no token ids with "
                "log-probabilities; choose engines that do by `model`",
                field="model",
            )


def check_count(n_rollouts: int, n_samples: int) -> None:
    """Raise InvalidRequest unless there are as many rollouts as the trainer listed samples."""
    if n_rollouts != n_samples:
        raise InvalidRequest(f"the trainer listed {n_samples} samples, but there are {n_rollouts} rollouts", field="n")


def check_vocabulary(rollout_id: str, segment: Segment, vocabulary: int | None) -> None:
    """Raise InvalidRequest if a token id is beyond the trainer's vocabulary, i.e. from another tokenizer."""
    if vocabulary is None:
        return
    highest = max(
        (int(ids.max()) for ids in (segment.prompt_ids, segment.response_ids) if len(ids)),
        default=0,
    )
    if highest >= vocabulary:
        raise InvalidRequest(
            f"rollout {rollout_id} has the token id {highest}, but the trainer's vocabulary has {vocabulary}: its "
            "engine has another tokenizer",
            field="vocabulary",
        )


def too_long(rollout_id: str, noun: str, n_tokens: int, most: int, option: str) -> InvalidRequest:
    """Return the error for a prompt or response that is longer than the trainer's arrays."""
    return InvalidRequest(
        f"rollout {rollout_id} has a {noun} of {n_tokens} tokens, and {option} is {most}: raise it, lower the limits "
        "of the rollouts, or choose by `too_long` to cut or to mask such rows",
        field=option,
    )
