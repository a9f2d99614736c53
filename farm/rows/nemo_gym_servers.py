"""NeMo Gym's resource servers: which servers' rows can run here, and their data sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from farm.rows.row_sources import ANSWER, MATH, PROGRAMS, SWE

_OPTIONS, _JUDGE, _LIBRARY, _OF_GPQA, _OF_TEXT = "options", "judge", "math_verify", "gpqa_diamond", "string_match"
_SERVERS: Mapping[str, tuple[str, str]] = {
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
_STRICT = "strict_single_letter_boxed"


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
        (server for server in _SERVERS if re.fullmatch(re.escape(server) + _HARNESS, agent)), agent
    )
    if named in _SERVERS:
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
        f"{', '.join(_SERVERS)}; use data source `environment` for others"
    )


def data_source_of(row: Mapping[str, Any]) -> str:
    """Return the data source for a row. Raises ValueError for a row that would lack tools or its server's rule."""
    server = server_of(row)
    if (row.get("responses_create_params") or {}).get("tools"):
        raise ValueError(f"it has tools of the server {server!r}, which the policy would lack: leave such rows out")
    return _SERVERS[server][0]


def fields_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row for its handler, with the defaults of its server."""
    data_source, kind = _SERVERS[server_of(row)]
    if data_source == MATH:
        metadata = row.get("metadata") or {}
        if "source_dataset" not in metadata:
            raise ValueError("a row of reasoning_gym needs its family in `metadata.source_dataset`; this one has none")
        return {
            "family": metadata["source_dataset"],
            **{name: row.get(name) for name in ("question", "answer")},
            "metadata": metadata,
        }
    result = {name: value for name, value in row.items() if name not in ("server", "agent_ref")}
    if kind == _OPTIONS:
        result.setdefault("grading_mode", _STRICT)
    if kind in (_LIBRARY, _OF_GPQA):
        result.setdefault("rule", kind)
    if kind == _OF_TEXT:
        exact = "_exact" if row.get("case_sensitive") else ""
        result.setdefault("rule", f"{kind}_{row.get('extraction_mode', 'final_answer')}{exact}")
    if kind == _JUDGE:
        result.setdefault("judge", {})
    return result
