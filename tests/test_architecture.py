"""What the import contracts cannot see: who reads the environment, how long a module is, and what it is called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for package in ("farm", "workers") for path in (ROOT / package).rglob("*.py"))
LONGEST_LINES = 400
VAGUE = {"utils", "util", "helpers", "helper", "common", "base", "manager", "managers", "misc"}

every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))


@every_module
def test_a_module_says_what_lives_in_it(path: Path) -> None:
    tree = ast.parse(path.read_text())
    is_empty_marker = path.name == "__init__.py" and not tree.body
    assert is_empty_marker or ast.get_docstring(tree), "open it with one sentence on what lives here"


@every_module
def test_a_module_is_one_noun(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_LINES, f"past {LONGEST_LINES} lines it is two nouns"


@every_module
def test_a_module_is_named_for_what_it_holds(path: Path) -> None:
    assert not VAGUE & {path.stem, *path.stem.split("_"), path.parent.name}, "name it for what it holds"


@every_module
def test_settings_alone_reads_the_farms_environment_variables(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path == ROOT / "farm" / "settings.py" or _runs_outside_the_farm(tree):
        return
    read = [name for node in ast.walk(tree) for name in _variables_read(node) if name.startswith("FARM_")]
    assert not read, f"add a field to farm/settings.py instead of reading {read}"


def test_the_schema_comes_from_migrations() -> None:
    assert (ROOT / "alembic" / "env.py").is_file()
    assert list((ROOT / "alembic" / "versions").glob("*.py")), "no revision: a new database would stay empty"


def _runs_outside_the_farm(tree: ast.Module) -> bool:
    """Whether variables are how it is told things: it is a script, or runs in a sandbox and imports nothing of ours."""
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {name for name in imported if name.split(".")[0] in {"farm", "workers"}}
    is_script = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)
    return not ours or (is_script and "farm.settings" not in ours)


def _variables_read(node: ast.AST) -> list[str]:
    """The names of the environment variables that this expression reads, where they are written out."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environ(node.value):
        return _texts([node.slice])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        by_get = node.func.attr in {"get", "pop", "setdefault"} and _is_environ(node.func.value)
        if by_get or node.func.attr == "getenv":
            return _texts(node.args[:1])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getenv":
        return _texts(node.args[:1])
    return []


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in {"os.environ", "environ", "os.environb"}


def _texts(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
