"""Rows with a program: LiveCodeBench, APPS, TACO, CodeContests, MBPP, EvalPlus, verl, NeMo Gym.

Tests may be stored as base64 of zlib: in LiveCodeBench of a pickle of one text, in NeMo Gym of JSON.
"""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

from farm.python_syntax import parsed
from workers.evaluators.program_tests.output_comparison import FORM
from workers.row_forms.prompts import messages_of, text_of

MAX_BYTES = 256_000_000
_BROKEN = (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError)
_OPTIONS = ("compare", "checker", "partial", "time_s", "memory_mb", "packages")
"""Fields of the instance that any row may have in addition to its own columns."""
_TEXTS = ("question_content", "question", "description", "text", "problem")
_TACO_COLUMNS = ("raw_tags", "skill_types", "Expected Auxiliary Space", "Expected Time Complexity")
_MAX_TIME_S = 60.0


class TextUnpickler(pickle.Unpickler):
    """Unpickles values without classes and functions; a pickle that names one is refused before anything runs."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}; only a text is allowed")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an outside object; only a text is allowed")


def pickled_text(encoded: str) -> str:
    """Return the text. Raises ValueError for anything else, and for more than MAX_BYTES."""
    try:
        text = TextUnpickler(io.BytesIO(_unpacked(encoded))).load()
    except _BROKEN as error:
        raise ValueError(f"the tests are not base64 of zlib of a pickled text: {error}") from None
    if not isinstance(text, str):
        raise ValueError(f"the pickle of the tests holds a {type(text).__name__}, not a text")
    return text


def packed_json(encoded: str) -> Any:
    """Return the JSON value. Raises ValueError for anything else, and for more than MAX_BYTES."""
    try:
        return json.loads(_unpacked(encoded))
    except (*_BROKEN, ValueError, RecursionError) as error:
        raise ValueError(f"the tests are not base64 of zlib of JSON: {error}") from None


def _unpacked(encoded: str) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(encoded, validate=True), MAX_BYTES)
    if not unpacker.eof:
        raise ValueError(f"it is truncated, or has more than {MAX_BYTES} bytes")
    return data


def program_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an instance of the handler `programs` for a row, or for such fields themselves.

    Columns that do not describe the problem or its tests are dropped. A row of a form whose authors have a scorer gets
    its rule, and its comparison unless the row sets one. Raises ValueError for a row without problem or tests.
    """
    if "tests" in row or "asserts" in row:
        return dict(row)
    fields = {name: row[name] for name in _OPTIONS if name in row}
    fields["prompt"] = messages_of(row) if not isinstance(row.get("prompt"), str) else []
    question = next((text for name in _TEXTS if isinstance(text := row.get(name), str) and text), "")
    fields["question"] = question or text_of(fields["prompt"]) or str(row.get("prompt") or "")
    if starter := row.get("starter_code"):
        fields["starter_code"] = starter
    for key, form in _FORMS.items():
        if row.get(key) is not None:
            fields |= form(row)
            return ({"compare": FORM} if "rule" in fields else {}) | fields
    raise ValueError(f"the row has no tests: none of {', '.join(_FORMS)}")


def _live_code_bench(row: Mapping[str, Any]) -> dict[str, Any]:
    cases = [*_cases(row.get("public_test_cases")), *_cases(row.get("private_test_cases"))]
    if not cases:
        raise ValueError("public_test_cases and private_test_cases are both empty")
    name = (_json(row.get("metadata")) or {}).get("func_name") or ""
    if all(case.get("testtype") != "functional" for case in cases):
        tests = [{"stdin": case["input"], "expected": case["output"]} for case in cases]
        return {"tests": tests, "rule": "livecodebench"}
    if not name:
        raise ValueError("metadata has no func_name, which functional tests need")
    calls = [_call_of_lines(case["input"], case["output"]) for case in cases]
    return {"function": name.rpartition(".")[2], "tests": calls, "rule": "livecodebench"}


def _cases(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str) and content.strip() and content.strip()[0] not in "[{":
        content = pickled_text(content)
    cases = _json(content) or []
    if not isinstance(cases, list) or not all(
        isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases
    ):
        raise ValueError("the test cases must be a list of {input, output, testtype}")
    return cases


def _call_of_lines(arguments: str, expected: str) -> dict[str, Any]:
    return {
        "arguments": [json.loads(line) for line in arguments.split("\n") if line.strip()],
        "expected": [json.loads(expected)],
    }


def _input_output(row: Mapping[str, Any]) -> dict[str, Any]:
    # Columns of TACO that APPS lacks.
    rule = "taco" if any(name in row for name in _TACO_COLUMNS) else "apps"
    return _paired(_json(row["input_output"]), wrapped=True) | {"rule": rule}


def _unit_tests(row: Mapping[str, Any]) -> dict[str, Any]:
    tests = _json(row["verifier_metadata"].get("unit_tests"))
    if isinstance(tests, Mapping) and "packed" in tests:
        inner = packed_json(tests["packed"])
        tests = {**inner, "fn_name": tests.get("fn_name")} if isinstance(inner, Mapping) else inner
    return _paired(tests) | {"rule": "nemo_gym"}


def _ground_truth(row: Mapping[str, Any]) -> dict[str, Any]:
    reward = _json(row.get("reward_model") or row.get("reward_spec"))
    tests = _json(reward.get("ground_truth"))
    if isinstance(tests, list):
        # SkyRL keeps those of LiveCodeBench here.
        return _live_code_bench({**row, "public_test_cases": tests}) | {"rule": "skyrl_lcb"}
    fields = _paired(tests, wrapped=True)
    # verl's scorer fails on lists; APPS's, its origin, reads them.
    is_text = all(isinstance(text, str) for text in tests["inputs"])
    return fields | {"rule": "prime_code" if is_text else "apps"}


def _paired(tests: Any, wrapped: bool = False) -> dict[str, Any]:
    """Return the tests of {inputs, outputs, fn_name}: texts, or lists of arguments and possibly wrapped values.

    With `wrapped`, values that are JSON texts may be wrapped, too.
    """
    if not isinstance(tests, Mapping) or "inputs" not in tests or "outputs" not in tests:
        raise ValueError("the tests must be an object of `inputs` and `outputs`")
    inputs, outputs, name = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    if not name:
        pairs = zip(inputs, outputs, strict=True)
        return {"tests": [{"stdin": _lines(stdin), "expected": _lines(out)} for stdin, out in pairs]}
    calls = []
    for arguments, expected in zip(inputs, outputs, strict=True):
        is_text = isinstance(arguments, str) and isinstance(expected, str)
        call = _call_of_lines(arguments, expected) if is_text else {"arguments": [*arguments], "expected": [expected]}
        value = call["expected"][0]
        if (wrapped or not is_text) and isinstance(value, list) and len(value) == 1:
            # Some rows of these sets wrap the value in a second list, and some do not.
            call["expected"].append(value[0])
        calls.append(call)
    return {"function": name, "tests": calls}


def _lines(text: Any) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _code_contests(row: Mapping[str, Any]) -> dict[str, Any]:
    tests = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        cases = _json(row.get(name)) or {}
        pairs = zip(cases.get("input", ()), cases.get("output", ()), strict=True)
        tests += [{"stdin": stdin, "expected": out} for stdin, out in pairs]
    fields: dict[str, Any] = {"tests": tests, "rule": "codecontests"}
    limit = row.get("time_limit")
    if isinstance(limit, Mapping):
        limit = float(limit.get("seconds") or 0) + float(limit.get("nanos") or 0) / 1e9
    if "time_s" not in row and isinstance(limit, int | float) and limit > 0:
        # The limit is meant for compiled programs.
        fields["time_s"] = min(_MAX_TIME_S, 3.0 * float(limit))
    if "memory_mb" not in row and (n_bytes := row.get("memory_limit_bytes")):
        fields["memory_mb"] = max(256, min(4096, int(n_bytes) >> 20))
    return fields


def _asserts(row: Mapping[str, Any]) -> dict[str, Any]:
    asserts = [*row["test_list"], *(row.get("challenge_test_list") or ())]
    setup = [str(row.get("test_setup_code") or ""), *(row.get("test_imports") or ())]
    names = {name for text in asserts for name in _called(text)}
    defined = _defined(str(row.get("code") or "")) & names or names
    first = next((name for name in _called(asserts[0]) if name in defined), "") if asserts else ""
    if not first:
        raise ValueError("test_list has no assert that calls a function")
    fields: dict[str, Any] = {"function": first, "asserts": asserts, "setup": "\n".join(filter(None, setup))}
    text = str(row.get("text") or row.get("prompt") or "")
    return fields | {"question": f"{text}\n\nYour code should pass this test, and others:\n\n{asserts[0]}"}


def _called(text: str) -> list[str]:
    """Return the names that a test calls, in order of the text, without Python's own."""
    try:
        tree = parsed(text)
    except SyntaxError as error:
        raise ValueError(f"a test is not Python: {error}") from None
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    ordered = sorted(calls, key=lambda name: (name.lineno, name.col_offset))
    return [name.id for name in ordered if not hasattr(builtins, name.id)]


def _defined(code: str) -> set[str]:
    try:
        tree = parsed(code)
    except SyntaxError:
        return set()
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def _eval_plus(row: Mapping[str, Any]) -> dict[str, Any]:
    inputs = [*(row.get("base_input") or ()), *(row.get("plus_input") or ())]
    fields: dict[str, Any] = {
        "function": row["entry_point"],
        "tests": [{"arguments": list(arguments), "expected": []} for arguments in inputs],
        "reference": str(row["prompt"]) + str(row["canonical_solution"]),
        "question": f"Complete this function:\n\n```python\n{row['prompt']}\n```",
    }
    eps = row.get("atol") or 0
    if not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ValueError(f"atol is {eps!r}; it must be at least 0 and less than 1")
    dataset = "mbpp" if str(row.get("task_id", "")).lower().startswith("mbpp") else "humaneval"
    return fields | {"rule": f"evalplus:{dataset}:{float(eps)!r}"}


def _json(content: Any) -> Any:
    return json.loads(content) if isinstance(content, str) else content


_FORMS = {
    "private_test_cases": _live_code_bench,
    "public_test_cases": _live_code_bench,
    "input_output": _input_output,
    "verifier_metadata": _unit_tests,
    "base_input": _eval_plus,
    "test_list": _asserts,
    "public_tests": _code_contests,
    "private_tests": _code_contests,
    "reward_model": _ground_truth,
    "reward_spec": _ground_truth,
}
"""The column that identifies a form, and the fields of its tests."""
