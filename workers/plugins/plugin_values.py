"""Validates the return values of plug-ins at the boundary of a stage, before they are stored or sent.

Each check raises the RolloutError of the plug-in that returned the value and names the field, so the store never has to
refuse a value. Texts may hold any characters: the store replaces those that it cannot hold. Everything else must be
JSON of bounded depth and size.

If a score has several named rewards, one of them is selected to count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from farm.errors import AgentError, EngineError, EvaluatorError, HandlerError, RolloutError
from farm.records.request import SandboxSpec
from farm.records.rollout import POLICY_OUTCOMES
from farm.records.submission import MAX_TREE_BYTES, MAX_TREE_FILES, SubmittedFile
from farm.records.trajectory import Message, ModelCall
from farm.records.values import storable
from workers.plugins.handler import NextTurn
from workers.plugins.interfaces import AgentResult, Artefact, Score, Submission

CONVENTION = "reward"
"""Name of the reward that counts if neither the batch nor the evaluator names one."""
_MB = 1_000_000
_MAX_BYTES = 64 * _MB
"""Maximum size of a submission, of an answer, and of a handler's initial messages."""
_MAX_DETAILS = 4 * _MB
_NAME = 200
_MAX_TOKENS = 2**31


def counting_reward(score: Score, what: str, rule: str | Mapping[str, float] = "") -> Any:
    """Return the reward that counts, unchecked: by the batch's rule, else the evaluator's, else by convention.

    A score of 0 without named rewards is 0 under every rule. Raises EvaluatorError if the score lacks a reward that the
    rule names, or if no rule selects one.
    """
    if not score.rewards and type(score.value) in (int, float) and score.value == 0.0:
        # A score of 0 without named rewards: for example, there was nothing to score.
        return 0.0
    if isinstance(rule, str) and rule:
        return _named(score, what, rule)
    if not isinstance(rule, str):
        try:
            return math.fsum(weight * _named(score, what, key) for key, weight in rule.items())
        except (OverflowError, ValueError):
            # A sum beyond the range of a float, or inf - inf.
            return math.nan
    left_out = isinstance(score.value, float) and math.isnan(score.value)
    if not (left_out and score.rewards):
        return score.value
    if CONVENTION in score.rewards:
        return score.rewards[CONVENTION]
    if len(score.rewards) == 1:
        return next(iter(score.rewards.values()))
    raise EvaluatorError(
        f"{what} gave the rewards {_names(score)}; none of them counts: name one, or weights, in the batch's `reward`"
    )


def _named(score: Score, what: str, key: str) -> float:
    if key not in score.rewards:
        raise EvaluatorError(f"{what} gave no reward {key!r}, which the batch counts; it gave {_names(score)}")
    return score.rewards[key]


def _names(score: Score) -> str:
    return ", ".join(repr(key) for key in sorted(score.rewards)) or "none by name"


def agent_result(result: Any, rollout_id: str) -> AgentResult:
    """Return an agent's result if valid. An outcome that only the farm causes is an AgentError, never scored."""
    if not isinstance(result, AgentResult):
        raise AgentError(f"{rollout_id}: its agent returned {_kind(result)}, not an AgentResult")
    if result.outcome not in POLICY_OUTCOMES:
        raise AgentError(f"{rollout_id}: its agent ended with {result.outcome!r}, an outcome that no policy can cause")
    if result.answer is not None and not isinstance(result.answer, str):
        raise AgentError(f"{rollout_id}: its agent answered with {_kind(result.answer)}, not a text")
    _check(result.answer, f"{rollout_id}: its agent's answer", AgentError, _MAX_BYTES)
    return result


def submission(submitted: Any, what: str) -> Submission:
    """Validate a handler's submission: an answer, and files as text or bytes."""
    if not isinstance(submitted, Submission):
        raise HandlerError(f"{what} returned {_kind(submitted)}, not a Submission")
    if submitted.answer is not None and not isinstance(submitted.answer, str):
        raise HandlerError(f"{what}: answer is {_kind(submitted.answer)}, not a text")
    for name, type_of in (("files", str), ("tree", SubmittedFile)):
        files = getattr(submitted, name)
        if not isinstance(files, dict):
            raise HandlerError(f"{what}: {name} is {_kind(files)}, not a dict")
        for path, value in files.items():
            if not isinstance(path, str) or not isinstance(value, type_of):
                raise HandlerError(f"{what}: {name} has {_kind(value)} for {path!r:.100}, not a {type_of.__name__}")
    _check([submitted.answer, submitted.files, list(submitted.tree)], what, HandlerError, _MAX_BYTES)
    n_bytes = sum(len(file.data) for file in submitted.tree.values())
    if n_bytes > MAX_TREE_BYTES or len(submitted.tree) > MAX_TREE_FILES:
        raise HandlerError(
            f"{what}: tree has {len(submitted.tree)} files of {n_bytes} bytes, more than {MAX_TREE_FILES} files or "
            f"{MAX_TREE_BYTES} bytes: collect less, or let the handler keep the layer"
        )
    return Submission.model_construct(answer=submitted.answer, files=dict(submitted.files), tree=dict(submitted.tree))


def rewards(value: Any, what: str) -> tuple[float, ...] | None:
    """Validate an environment's step rewards, as recorded by the agent: finite numbers, or None."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(map(_is_number, value)):
        raise AgentError(f"{what}: its rewards must be a list of finite numbers")
    return tuple(map(float, value))


def messages(value: Any, what: str) -> list[Message]:
    """Validate a handler's initial conversation: a list of JSON objects."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, dict) for each in value):
        raise HandlerError(f"{what} returned {_kind(value)}, not a list of messages")
    _check(value, what, HandlerError, _MAX_BYTES)
    return list(value)


def next_turn(value: Any, what: str) -> NextTurn:
    """Validate a task's next step: messages, and a record that is JSON."""
    if not isinstance(value, NextTurn):
        raise HandlerError(f"{what} returned {_kind(value)}, not a NextTurn")
    if not isinstance(value.record, dict):
        raise HandlerError(f"{what}: record is {_kind(value.record)}, not a dict")
    _check(value.record, f"{what}: record", HandlerError, _MAX_DETAILS)
    return NextTurn(messages(value.messages, what), value.record)


def score(scored: Any, what: str, rule: str | Mapping[str, float] = "") -> Score:
    """Validate an evaluator's score, with the reward that counts under the batch's rule, and details that are JSON."""
    if not isinstance(scored, Score):
        raise EvaluatorError(f"{what} returned {_kind(scored)}, not a Score")
    if not isinstance(scored.rewards, dict):
        raise EvaluatorError(f"{what}: rewards is {_kind(scored.rewards)}, not a dict")
    for key, value in scored.rewards.items():
        if not isinstance(key, str) or not _is_number(value):
            raise EvaluatorError(f"{what} gave {_shown(value)} as the reward {_shown(key)}; it must be a finite number")
    value = counting_reward(scored, what, rule)
    if not _is_number(value):
        raise EvaluatorError(f"{what} gave {_shown(value)} as the reward; it must be a finite number")
    if not isinstance(scored.details, dict):
        raise EvaluatorError(f"{what}: details is {_kind(scored.details)}, not a dict")
    _check(scored.details, f"{what}: details", EvaluatorError, _MAX_DETAILS)
    _check(scored.rewards, f"{what}: rewards", EvaluatorError, _MAX_DETAILS)
    for field, values in (("call_rewards", scored.call_rewards), ("row_rewards", scored.row_rewards)):
        if not isinstance(values, dict):
            raise EvaluatorError(f"{what}: {field} is {_kind(values)}, not a dict")
        for index, each in values.items():
            if type(index) is not int or not _is_number(each):
                pair = f"{_shown(each)} as the reward of {_shown(index)}"
                raise EvaluatorError(f"{what}: {field}: {pair}; it must be a finite number of an index")
    # Numbers of other libraries, such as NumPy's, are refused by database drivers.
    return Score(
        float(value),
        scored.details,
        *({key: float(each) for key, each in values.items()} for values in _rewards_of(scored)),
    )


def _rewards_of(scored: Score) -> tuple[dict[Any, float], ...]:
    return scored.rewards, scored.call_rewards, scored.row_rewards


def name(value: Any, what: str) -> str:
    """Validate the name of an evaluator."""
    if not isinstance(value, str) or len(value) > _NAME:
        raise EvaluatorError(f"{what} is {_kind(value)}, not a text of at most {_NAME} characters")
    return value


def spec(value: Any, what: str, error_type: type[RolloutError]) -> SandboxSpec | None:
    """Validate a plug-in's sandbox spec, or None; raise `error_type` for anything else."""
    if value is not None and not isinstance(value, SandboxSpec):
        raise error_type(f"{what} returned {_kind(value)}, not a SandboxSpec")
    return value


def record(call: ModelCall, rollout_id: str) -> None:
    """Validate a model call: some fields come from the engine, the others from the agent and its tools."""
    what = f"{rollout_id}: a model call of engine {call.engine!r:.200}"
    for field in ("finish_reason", "engine", "policy_version", "begins"):
        if not isinstance(getattr(call, field), str):
            raise EngineError(f"{what}: {field} is {_kind(getattr(call, field))}, not a text")
    if call.reward is not None and not _is_number(call.reward):
        raise AgentError(f"{rollout_id}: reward of a model call is {_shown(call.reward)}, not a finite number")
    for field in ("n_prompt_tokens", "n_response_tokens", "n_cached_tokens", "n_invalid", "mismatch"):
        number = getattr(call, field)
        if number is not None and (type(number) is not int or not 0 <= number < _MAX_TOKENS):
            raise EngineError(f"{what}: {field} is {number!r:.100}, not a number of tokens")
    _check(call.stop_reason, f"{what}: stop_reason", EngineError, _MAX_DETAILS)
    _check(call.response, f"{what}: its message", EngineError, _MAX_BYTES)
    for field in ("messages", "observations", "sampling"):
        _check(getattr(call, field), f"{rollout_id}: {field} of a model call", AgentError, _MAX_BYTES)
    _check_tools(call.tools, f"{rollout_id}: tools of a model call")


def artefact(value: Any, rollout_id: str) -> None:
    """Validate a tool's artefact."""
    if not isinstance(value, Artefact):
        raise AgentError(f"{rollout_id}: an artefact is {_kind(value)}")
    if not isinstance(value.name, str) or not isinstance(value.media_type, str) or not isinstance(value.data, bytes):
        kinds = ", ".join(map(_kind, (value.name, value.media_type, value.data)))
        raise AgentError(f"{rollout_id}: an artefact's name, media type and data are {kinds}, not texts and bytes")


def _check_tools(tools: Any, what: str) -> None:
    """Check tools less strictly: schemas of programs may be nested deeper and have larger integers."""
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise AgentError(f"{what} are {_kind(tools)}, not a list of objects")
    try:
        n_bytes = len(json.dumps(tools))
    except (TypeError, ValueError, RecursionError) as error:
        raise AgentError(f"{what} are not JSON: {error}") from None
    if n_bytes > _MAX_BYTES:
        raise AgentError(f"{what} have {n_bytes} bytes, more than the {_MAX_BYTES} allowed")


def _check(value: Any, what: str, error_type: type[RolloutError], most: int) -> None:
    try:
        storable(value, most)
    except ValueError as error:
        raise error_type(f"{what}: {error}") from None


def _is_number(value: Any) -> bool:
    """Return whether it is a finite number. Bools are refused, as they are most likely mistakes."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.100}"
    except Exception:
        return _kind(value)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
