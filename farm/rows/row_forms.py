"""Row formats by name: the handler of a row, its fields there, and the columns that identify it.

Handlers take rows of their kind unchanged, so a form mostly chooses the handler, by the row's contents. The form of
NeMo Gym has a resource server: which servers' rows can run here, and their data sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ANSWER, PROGRAMS, SWE, ENVIRONMENT, FUNCTION, MATH = "answer", "programs", "swe-bench", "environment", "code", "math"
_OPTIONS, _JUDGE, _LIBRARY, _OF_GPQA, _OF_TEXT = "options", "judge", "math_verify", "gpqa_diamond", "string_match"
_GYM_SERVERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("math_with_judge", "polymath"), (ANSWER, _LIBRARY)),
    "mcqa": (ANSWER, _OPTIONS),
    "gpqa_diamond": (ANSWER, _OF_GPQA),
    **dict.fromkeys(
        ("math_with_autograder", "physics_judge", "ugphysics_judge", "simpleqa", "omniscience"), (ANSWER, _JUDGE)
    ),
    **dict.fromkeys(("frontierscience_judge", "equivalence_llm_judge"), (ANSWER, _JUDGE)),
    "string_match": (ANSWER, _OF_TEXT),
    "reasoning_gym": (MATH, ""),
    "code_gen": (PROGRAMS, ""),
    "swebench": (SWE, ""),
}
"""Data source and kind of the rows of each server: multiple choice, judged, or scored by a library's rule."""
_HARNESS = r"(?:_(?:simple|gymnasium|cline|codex|hermes|kilocode|openclaw|opencode|pi))?_agent"

Row = Mapping[str, Any]
_CODE_SOURCES = (
    "apps",
    "taco",
    "codecontests",
    "code_contests",
    "codeforces",
    "livecodebench",
    "leetcode",
    "prime_code",
)
_SWE_SOURCES = (
    "swe-bench",
    "swe_bench",
    "swe-gym",
    "swe_gym",
    "swegym",
    "swe-smith",
    "r2e-gym",
    "r2egym",
    "swe-rebench",
)
_SKYRL_ANSWERS = ("aime", "gsm8k")
_SKYRL_CODE = ("lcb",)
_SKYRL_ENVIRONMENTS = ("gsm8k_multi_turn",)
_SKYRL_SERVED = {
    "search": "a search engine, at an address of the trainer's configuration",
    "searchcode": "a search engine and an interpreter, at addresses of the trainer's configuration",
    "text2sql": "databases, in a folder of the trainer's configuration",
}
_IDS = ("instance_id", "question_id", "problem_id", "task_id", "uuid", "id", "unique_id")


def server_of(row: Mapping[str, Any]) -> str:
    """Return the server that scores a row. Raises ValueError without a known server.

    It is named by `server`, or by `agent_ref`, whose agents are named after their server and their harness, or is
    recognized by a column.
    """
    parameters = row.get("responses_create_params") or {}
    if "instance_dict" in (parameters.get("metadata") or {}) or ("FAIL_TO_PASS" in row and "base_commit" in row):
        return "swebench"
    agent = (row.get("agent_ref") or {}).get("name") or ""
    named = str(row.get("server") or "") or next(
        (server for server in _GYM_SERVERS if re.fullmatch(re.escape(server) + _HARNESS, agent)), agent
    )
    if named in _GYM_SERVERS:
        return named
    if not named and "unit_tests" in (row.get("verifier_metadata") or {}):
        return "code_gen"
    if not named and "options" in row and "grading_mode" in row:
        return "mcqa"
    if not named:
        raise ValueError(
            "it has no agent in `agent_ref`, which identifies its server: give the server, as in "
            "--set server=math_with_judge"
        )
    raise ValueError(
        f"its agent is {named!r}, and only that agent's server can score it. Servers whose rows are supported: "
        f"{', '.join(_GYM_SERVERS)}; use data source `environment` for others"
    )


def _server_source(row: Mapping[str, Any]) -> str:
    """Return the data source for a row. Raises ValueError for a row that would lack tools or its server's rule."""
    server = server_of(row)
    if (row.get("responses_create_params") or {}).get("tools"):
        raise ValueError(f"it has tools of the server {server!r}, which the policy would lack: leave such rows out")
    return _GYM_SERVERS[server][0]


def _server_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row for its handler, with the defaults of its server."""
    data_source, kind = _GYM_SERVERS[server_of(row)]
    if data_source == MATH:
        metadata = row.get("metadata") or {}
        if "source_dataset" not in metadata:
            raise ValueError("a row of reasoning_gym needs its family in `metadata.source_dataset`; this one has none")
        return {
            "family": metadata["source_dataset"],
            **{name: row.get(name) for name in ("question", "answer")},
            "metadata": metadata,
        }
    fields = {name: value for name, value in row.items() if name not in ("server", "agent_ref")}
    if kind == _OPTIONS:
        fields.setdefault("grading_mode", "strict_single_letter_boxed")
    if kind in (_LIBRARY, _OF_GPQA):
        fields.setdefault("rule", kind)
    if kind == _OF_TEXT:
        exact = "_exact" if row.get("case_sensitive") else ""
        fields.setdefault("rule", f"{kind}_{row.get('extraction_mode', 'final_answer')}{exact}")
    if kind == _JUDGE:
        fields.setdefault("judge", {})
    return fields


@dataclass(frozen=True, slots=True)
class RowForm:
    """A form: `handler` returns the data source of a row, `fields` the instance's fields; both raise ValueError.

    `deduplicate`: by default skip rows with a repeated index or prompt. `settable` are columns that the user may set
    for all rows that lack them, like the trainer's configuration does.
    """

    handler: Callable[[Row], str]
    about: str
    fields: Callable[[Row], dict[str, Any]] = dict
    deduplicate: bool = False
    settable: tuple[str, ...] = ()


def _verl(row: Row) -> str:
    if "reward_model" not in row and "ground_truth" not in row:
        raise ValueError("a row of verl needs `reward_model` with the `ground_truth`; this one has none")
    source = str(row.get("data_source", "")).lower()
    if any(name in source for name in _SWE_SOURCES) or "instance" in _extra(row):
        return SWE
    if any(name in source for name in _CODE_SOURCES) or _has_tests(ground_truth(row)):
        return PROGRAMS
    return ANSWER


def _verl_fields(row: Row) -> dict[str, Any]:
    return dict(row) if _verl(row) != SWE else _swe_row(row)


def _swe_row(row: Row) -> dict[str, Any]:
    inner = row.get("instance") or _extra(row).get("instance") or row
    inner = json.loads(inner) if isinstance(inner, str) else inner
    if not isinstance(inner, Mapping) or "instance_id" not in inner:
        raise ValueError("a row for a SWE data set needs its row in `instance` or `extra_info.instance`")
    return dict(inner)


def _skyrl(row: Row) -> str:
    name = str(row.get("env_class") or row.get("env_id") or "")
    if not name:
        raise ValueError("a row of SkyRL needs an `env_class`; this one has none: give it, as in --set env_class=gsm8k")
    if "instance" in row and name == "null":
        # rows of SkyRL's mini-swe-agent example, which has its own loop
        return SWE
    if name in _SKYRL_ANSWERS:
        return ANSWER
    if name in _SKYRL_CODE:
        return PROGRAMS
    if name in _SKYRL_ENVIRONMENTS:
        return ENVIRONMENT
    own = "write an environment for such rows"
    if name in _SKYRL_SERVED:
        raise ValueError(f"its env_class {name!r} needs {_SKYRL_SERVED[name]}, which no sandbox reaches: {own}")
    known = ", ".join((*_SKYRL_ANSWERS, *_SKYRL_CODE, *_SKYRL_ENVIRONMENTS))
    raise ValueError(f"its env_class {name!r} is the trainer's own class, not one of {known}: {own}")


def _skyrl_fields(row: Row) -> dict[str, Any]:
    handler = _skyrl(row)
    spec = row.get("reward_spec") or row.get("reward_model")
    if handler == SWE:
        return _swe_row(row)
    if handler != ENVIRONMENT:
        return {**{name: row[name] for name in row if name != "reward_spec"}, "reward_model": spec or {}}
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class", "env_id")}
    if spec is not None:
        extras["reward_spec"] = spec
    prompt = row.get("prompt") or []
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    name = row.get("env_class") or row.get("env_id")
    return {"environment": "skyrl_gym", "id": name, "kwargs": extras, "messages": messages}


def _nemo_gym(row: Row) -> str:
    if not isinstance(row.get("responses_create_params"), Mapping) and "FAIL_TO_PASS" not in row:
        raise ValueError("a row of NeMo Gym needs `responses_create_params`; this one has none")
    return _server_source(row)


def _of(handler: str) -> Callable[[Row], str]:
    return lambda row: handler


FORMS: Mapping[str, RowForm] = {
    "verl": RowForm(
        _verl,
        "verl's columns: data_source, prompt, reward_model, extra_info",
        _verl_fields,
        settable=("data_source", "rule"),
    ),
    "dapo": RowForm(_verl, "DAPO-Math-17k: verl's columns; repeats are read once", _verl_fields, deduplicate=True),
    "skyrl": RowForm(_skyrl, "SkyRL's columns: prompt, env_class, reward_spec", _skyrl_fields, settable=("env_class",)),
    "nemo-gym": RowForm(
        _nemo_gym,
        "NeMo Gym's lines: responses_create_params and what its server checks",
        _server_fields,
        settable=("server",),
    ),
    "swe-bench": RowForm(_of(SWE), "SWE-bench, its Lite and Verified, SWE-Gym, SWE-smith, SWE-rebench, R2E-Gym"),
    "answer": RowForm(
        _of(ANSWER),
        "Polaris, DeepScaleR, AIME, slime, SuperGPQA, WebInstruct-verified and their like",
        settable=("rule", "rm_type"),
    ),
    "programs": RowForm(_of(PROGRAMS), "LiveCodeBench, APPS, TACO, CodeContests, MBPP and their like"),
    "humaneval": RowForm(_of(FUNCTION), "HumanEval: task_id, prompt, entry_point, test"),
}


def ground_truth(row: Row) -> Any:
    """Return the gold answer of a row in verl's form; JSON text is parsed unless it is a plain number or text."""
    reward = row.get("reward_model")
    reward = json.loads(reward) if isinstance(reward, str) else reward
    value = reward.get("ground_truth") if isinstance(reward, Mapping) else row.get("ground_truth")
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def known_by(row: Row) -> str:
    """Return the name that identifies a row: its index or id, with its own data source; empty without one."""
    extra = _extra(row)
    for value in (extra.get("index"), row.get("index"), *(row.get(name) for name in _IDS)):
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            source = row.get("data_source")
            plain = isinstance(value, int) and isinstance(source, str)
            # numbers restart in each source that a file mixes
            return f"{source}-{value}"[:200] if plain else str(value)[:200]
    return ""


def prompt_text(row: Row) -> str:
    """Return the prompt of a row, to find repeats; empty if it has none of the usual columns."""
    for name in ("prompt", "question", "problem", "responses_create_params"):
        if row.get(name):
            return json.dumps(row[name], sort_keys=True)
    return ""


def _extra(row: Row) -> Row:
    extra = row.get("extra_info")
    return extra if isinstance(extra, Mapping) else {}


def _has_tests(value: Any) -> bool:
    return isinstance(value, Mapping) and ("inputs" in value or "fn_name" in value)
