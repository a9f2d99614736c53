"""A grader scores correctly if its user cannot read the modules, and a missing module is no wrong answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from farm.errors import EvaluatorError
from workers.evaluators.answers.equality import FAMILY
from workers.evaluators.grading import graded
from workers.evaluators.node_conditions import Conditions

ROOT = Path(__file__).parents[3]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another user")
BROKEN = """

def load():
    pass


def equal(answer, entry):
    return 0.0
"""
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from workers.evaluators import grader
from workers.evaluators.answers import equality
if {breaks!r}:
    grader.import_all = lambda packages: None
    equality.KNOWN_PAIRS = ()
grader.main("nobody", sys.argv[1])
"""


def closed_copy(folder: Path) -> Path:
    """Return a copy of the product that only root can enter."""
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    for package in ("farm", "workers"):
        shutil.copytree(ROOT / package, closed / package, ignore=shutil.ignore_patterns("__pycache__"))
    return closed


def replies(folder: Path, library: str, *requests: Mapping[str, object], breaks: bool = False) -> list[dict[str, Any]]:
    lines = "".join(json.dumps({"id": number, "limit_s": 600, **each}) + "\n" for number, each in enumerate(requests))
    run = subprocess.Popen(
        [sys.executable, "-I", "-c", PROGRAM.format(folder=str(folder), breaks=breaks), library],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdin
    assert run.stdout
    with run:
        run.stdin.write(lines)
        run.stdin.flush()
        result = [json.loads(run.stdout.readline()) for _ in range(len(requests) + 1)]
        run.stdin.close()
    return result


@needs_root
def test_mathematics_is_scored_without_access_to_the_product_folder(tmp_path: Path) -> None:
    limit = {"family": FAMILY, "entry": {"gold": r"\lim_{x\to 0} \frac{\sin x}{x}"}}
    assert_graded_correctly(closed_copy(tmp_path), FAMILY, [(limit, "1", "2")])


@needs_root
def test_puzzles_are_scored_without_access_to_the_product_folder(tmp_path: Path) -> None:
    import reasoning_gym

    cases = []
    for family, wrong in (("simple_integration", "x"), ("binary_matrix", "[[9]]")):
        entry = reasoning_gym.create_dataset(family, size=1, seed=5)[0]
        cases.append(({"family": family, "entry": entry}, str(entry["answer"]), wrong))
    assert_graded_correctly(closed_copy(tmp_path), "reasoning-gym", cases)


def assert_graded_correctly(folder: Path, library: str, cases: list[tuple[dict[str, Any], str, str]]) -> None:
    submissions = [{**question, "answer": answer} for question, right, wrong in cases for answer in (right, wrong)]
    started, *scored = replies(folder, library, *submissions)
    assert started == {"failure": ""}
    by_id = {each["id"]: each["reply"] for each in scored}
    for number, question in enumerate(submissions):
        if number % 2 == 0:
            assert by_id[number] == {"score": 1.0}, question
        else:
            assert by_id[number].get("score", 0.0) < 1.0, question
            assert "broken" not in by_id[number], question


@needs_root
def test_failed_late_import_is_an_error_and_no_zero(tmp_path: Path) -> None:
    """A grader that does not import all it needs does not pass its proof either."""
    closed = closed_copy(tmp_path)
    late = closed / "late_module.py"
    late.write_text("VALUE = 1.0\n")
    (closed / "workers/evaluators/answers/equality.py").write_text(
        "FAMILY = 'math-verify'\nKNOWN_PAIRS = ()\n"
        "def load():\n    pass\n"
        "def equal(answer, entry):\n"
        "    try:\n        from late_module import VALUE\n"
        "    except ImportError:\n        VALUE = 0.0\n"
        "    return VALUE\n"
    )
    submission = {"family": FAMILY, "entry": {"gold": "1"}, "answer": "1"}
    started, scored = replies(closed, FAMILY, submission, breaks=True)
    assert started == {"failure": ""}
    assert scored["reply"] == {"broken": "cannot import late_module"}


@needs_root
def test_missing_module_of_one_family_does_not_affect_others(tmp_path: Path) -> None:
    """A verifier made without a module, and one whose making fails without it; each time, and no other family."""
    closed = closed_copy(tmp_path)
    (closed / "late_module.py").write_text("VALUE = 1.0\n")
    package = closed / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "factory.py").write_text(
        "DATASETS = {}\n"
        "def get_score_answer_fn(family):\n"
        "    if family != 'whole':\n"
        "        try:\n            import late_module\n"
        "        except ImportError:\n            assert family == 'swallows'\n"
        "    return lambda answer, entry: float(answer == 'right')\n"
    )
    (closed / "workers/evaluators/answers/equality.py").write_text(
        "FAMILY, WHOLE_RESPONSE = 'math-verify', ''\nKNOWN_PAIRS = ()\ndef load():\n    import reasoning_gym.factory\n"
    )
    families = ("swallows", "whole", "fails", "whole", "swallows", "fails", "whole")
    submissions = [{"family": family, "entry": {}, "answer": "right"} for family in families]
    started, *scored = replies(closed, FAMILY, *submissions, breaks=True)
    assert started == {"failure": ""}
    by_id = {each["id"]: each["reply"] for each in scored}
    lacks = {"broken": "cannot import late_module"}
    assert [by_id[number] for number in range(len(families))] == [
        {"score": 1.0} if family == "whole" else lacks for family in families
    ]


def test_grader_that_fails_its_self_test_does_not_start(tmp_path: Path) -> None:
    closed = closed_copy(tmp_path)
    equality = closed / "workers/evaluators/answers/equality.py"
    equality.write_text(equality.read_text() + BROKEN)
    (started,) = replies(closed, FAMILY)
    assert started == {"failure": "math-verify finds '0.5' not to be right: {'score': 0.0}"}


def test_broken_scorer_is_an_evaluator_error() -> None:
    with pytest.raises(EvaluatorError, match=r"math-verify cannot import late_module: .* readable by"):
        graded(FAMILY, {"reply": {"broken": "cannot import late_module"}, "end": {"code": 0}}, 1.0, Conditions())
