"""Tool calls, as parsed by the farm and by the parsers of vLLM, SGLang and renderers: `make test-oracles`.

Generated texts in each format, intact and damaged. FARM_TEST_ORACLES is a folder, in which
`tool_calls_environment.sh FOLDER/tool_calls` installs the packages; without them the test is skipped.
FARM_TOOL_CALLS_RECORD=1 writes a few of the results where `make test` reads them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.oracles.cases.tool_call_cases import RECORDS, TOOLS, WRITERS, Case, Read, agrees, cases, faults, ours

PYTHON = Path(os.environ.get("FARM_TEST_ORACLES", "")) / "tool_calls" / ".venv" / "bin" / "python"
PROGRAM = Path(__file__).parent / "programs" / "parse_tool_calls.py"
N_CASES = 320
"""For a format."""
N_RECORDED = 8

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the packages are not installed below FARM_TEST_ORACLES")


def read_by_packages(requested: Sequence[Case]) -> list[dict[str, Read | str]]:
    """Return the calls that each package parses from each case."""
    lines = [json.dumps({"format": case.format, "text": case.text, "tools": TOOLS}) + "\n" for case in requested]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(PYTHON), str(PROGRAM)], input="".join(lines), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_parsers_of_the_farm_agree_with_the_reference_packages() -> None:
    requested = [case for name in WRITERS for case in cases(name, N_CASES)]
    answers = read_by_packages(requested)
    assert len(answers) == len(requested)
    found = [fault for case, theirs in zip(requested, answers, strict=True) for fault in faults(case, theirs)]
    counted: Counter[tuple[str, str]] = Counter()
    for case, theirs in zip(requested, answers, strict=True):
        counted[case.format, "cases"] += 1
        counted[case.format, "ours as written"] += agrees(ours(case), case.calls)
        for package, read in theirs.items():
            counted[case.format, f"{package} as written"] += not isinstance(read, str) and agrees(read, case.calls)
            counted[case.format, f"{package} as ours"] += not isinstance(read, str) and agrees(read, ours(case))
    for name in WRITERS:
        print(name, {what: n for (of, what), n in counted.items() if of == name})
    assert not found, f"{len(found)}:\n" + "\n".join(found[:10])
    if os.environ.get("FARM_TOOL_CALLS_RECORD"):
        RECORDS.write_text(
            "".join(
                json.dumps(
                    {"format": case.format, "kind": case.kind, "text": case.text, "calls": case.calls, "read": read}
                )
                + "\n"
                for number, (case, read) in enumerate(zip(requested, answers, strict=True))
                if number % N_CASES < N_RECORDED
            )
        )
