"""The layout of the tree: forbidden imports, and the places where ids are built."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = [path for package in ("farm", "workers") for path in (ROOT / package).rglob("*.py")]
ISOLATION = ROOT / "workers" / "sandboxes" / "isolation"
IDS = ROOT / "farm" / "ids.py"
_ID = re.compile(r"(batch|group|rollout|sandbox)_id$")
_SPLITS = {"split", "rsplit", "partition", "rpartition"}


def test_isolation_imports_only_the_standard_library() -> None:
    allowed = {*sys.stdlib_module_names, "workers.sandboxes.isolation"}
    foreign = [
        f"{path.name}: {name}"
        for path in sorted(ISOLATION.glob("*.py"))
        for name in _imported(ast.parse(path.read_text()))
        if name.split(".")[0] not in allowed and ".".join(name.split(".")[:3]) not in allowed
    ]
    assert foreign == [], "it runs as `python -I -S`, without installed packages"


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        ("workers/evaluators/issues/library_program.py", ()),
        ("workers/policy/gateway/relay.py", ()),
        ("workers/conformance/programs/*.py", ()),
        ("workers/proofs/known_environment.py", ("workers.environments.environment",)),
        ("workers/environments/environment_server.py", ("workers.environments.",)),
        ("workers/environments/adapters/*.py", ("workers.environments.",)),
    ],
)
def test_modules_sent_into_sandboxes_import_only_modules_sent_with_them(pattern: str, allowed: tuple[str, ...]) -> None:
    paths = sorted(ROOT.glob(pattern))
    foreign = [
        f"{path.name}: {name}"
        for path in paths
        for name in _imported(ast.parse(path.read_text()))
        if name.startswith(("farm.", "workers.")) and not name.startswith(allowed or "-")
    ]
    assert paths, pattern
    assert foreign == [], "a sandbox has no other modules of the farm"


def test_programs_for_other_environments_do_not_import_pytest() -> None:
    todo = [ROOT / "tests/vllm/learner_checks.py", ROOT / "tests/unit/farm/adapters/ended_rollout.py"]
    todo += [path for name in ("trainers", "protocols") for path in (ROOT / "tests" / name / "programs").glob("*.py")]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in seen and path.is_file():
            seen.add(path)
            names = [*_imported(ast.parse(path.read_text()))]
            assert "pytest" not in names, f"{path} runs in environments without pytest"
            todo += [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith(("tests.", "testkit."))]
    assert len(seen) > 10


def test_tests_benchmarks_and_testkit_do_not_import_each_other() -> None:
    apart = {"tests": {"benchmarks"}, "benchmarks": {"tests"}, "testkit": {"tests", "benchmarks"}}
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder, others in apart.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        # parsing all of them would take seconds
        if re.search(rf"import.*\b({'|'.join(others)})\b|from ({'|'.join(others)})\b", text := path.read_text())
        for name in _imported(ast.parse(text))
        if name.split(".")[0] in others
    ]
    assert found == [], "testkit has what both need; it imports neither"


def test_each_test_with_a_long_form_has_the_marker_of_a_soak() -> None:
    chosen = re.compile(r"^from tests\.services\.soak import .*\b(at_length|repeats)\b", re.M)
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    with_long_forms = {path: text for path, text in files.items() if chosen.search(text)}
    assert len(with_long_forms) > 10
    missing = [str(path.relative_to(ROOT)) for path, text in with_long_forms.items() if "mark.soak" not in text]
    assert missing == [], "`make soak` would not run their long forms"


def test_only_the_ids_module_builds_and_parses_ids() -> None:
    elsewhere = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(set(PRODUCT) - {IDS})
        if "_id" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.expr) and (_builds_an_id(node) or _parses_an_id(node))
    ]
    assert elsewhere == [], "farm/ids.py builds and parses them"


def _builds_an_id(node: ast.expr) -> bool:
    """Return whether a dot and more follows an id in a text; only a dot may end a sentence."""
    if not isinstance(node, ast.JoinedStr):
        return False
    return any(
        isinstance(before, ast.FormattedValue)
        and _ID.search(ast.unparse(before.value))
        and isinstance(after, ast.Constant)
        and (re.match(r"\.\w", str(after.value)) or (after.value == "." and after is not node.values[-1]))
        for before, after in pairwise(node.values)
    )


def _parses_an_id(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _SPLITS
        and bool(_ID.search(ast.unparse(node.func.value)))
        and bool(node.args)
        and ast.unparse(node.args[0]) == "'.'"
    )


@pytest.mark.parametrize("text", ["f'{batch_id}.{group}'", "f'{job.rollout_id}.eval'", "rollout_id.rpartition('.')[0]"])
def test_expression_that_builds_or_parses_an_id_is_detected(text: str) -> None:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr)]
    assert any(_builds_an_id(node) or _parses_an_id(node) for node in nodes)


@pytest.mark.parametrize("text", ["f'there is no rollout {rollout_id}.'", "f'{batch_id}: {n}.{m}'", "name.split('.')"])
def test_text_with_an_id_is_not_reported(text: str) -> None:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr)]
    assert not any(_builds_an_id(node) or _parses_an_id(node) for node in nodes)


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules that are imported at run time, not those only for type checkers."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.ImportFrom):
        yield node.module or ""
    elif isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    for each in ast.iter_child_nodes(node):
        yield from _imported(each)
