"""Rules beyond the import contracts: reads of the environment, docstrings and names of modules."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for package in ("farm", "workers") for path in (ROOT / package).rglob("*.py"))
CONFIG_FILE = ROOT / "farm" / "configuration" / "config_file.py"
"""It finds the settings file, so it runs before the settings."""
READS_SETTINGS = (
    # commands and processes
    "farm/cli/",
    "farm/embedded/",
    "farm/observing/process_log.py",
    "workers/cli/",
    "workers/node/",
    "workers/process/",
    "workers/queue/",
    # the client in another program
    "farm/client/connect.py",
    "farm/client/local.py",
    "farm/client/remote.py",
    # objects that plug-ins and tests make without a config
    "workers/config.py",
    "workers/proofs/proof.py",
    "workers/sandboxes/provider.py",
    "workers/stages/redaction.py",
    "workers/testing/local_sandbox.py",
    "workers/tools/search.py",
)
"""The modules that may read the settings of their process; all others get values or a config."""
VAGUE = {"utils", "util", "helpers", "helper", "common", "base", "manager", "managers", "misc"}


def _breaking(is_kept: Callable[[Path], bool]) -> list[str]:
    """Return the modules of the farm that break a rule."""
    return [str(path.relative_to(ROOT)) for path in MODULES if not is_kept(path)]


def test_every_module_has_a_docstring() -> None:
    def has_docstring(path: Path) -> bool:
        text = path.read_text()
        if re.match(r'"""\w', text):
            return True
        tree = ast.parse(text)
        is_empty_marker = path.name == "__init__.py" and not tree.body
        return is_empty_marker or bool(ast.get_docstring(tree))

    assert _breaking(has_docstring) == [], "add a docstring of one sentence"


def test_no_module_has_a_vague_name() -> None:
    assert _breaking(lambda path: not VAGUE & {path.stem, *path.stem.split("_"), path.parent.name}) == []


def test_only_settings_reads_environment_variables_of_the_farm() -> None:
    def reads_no_farm_variables(path: Path) -> bool:
        text = path.read_text()
        # parsing and walking through all modules would take seconds
        if not re.search("environ|getenv", text):
            return True
        tree = ast.parse(text)
        if path in {ROOT / "farm" / "settings.py", CONFIG_FILE} or _runs_outside_the_farm(tree):
            return True
        return not [name for node in ast.walk(tree) for name in _variables_read(node) if name.startswith("FARM_")]

    assert _breaking(reads_no_farm_variables) == [], "add a field to farm/settings.py instead"


def test_only_processes_clients_and_commands_read_the_settings() -> None:
    def reads_no_settings(path: Path) -> bool:
        text = path.read_text()
        if "from farm.settings" not in text:
            return True
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        names = {name.name for node in imports if node.module == "farm.settings" for name in node.names}
        return "settings" not in names or str(path.relative_to(ROOT)).startswith(READS_SETTINGS)

    assert _breaking(reads_no_settings) == [], "pass values, or the config of the stage, the sandbox or the API"


def test_schema_has_migrations() -> None:
    assert (ROOT / "alembic" / "env.py").is_file()
    assert list((ROOT / "alembic" / "versions").glob("*.py")), "no revision: a new database would stay empty"


def test_import_contract_of_the_client_lists_all_its_light_modules() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [contract] = [
        each for each in project["tool"]["importlinter"]["contracts"] if each["name"].startswith("A trainer's client")
    ]
    modules = {f"farm.client.{path.stem}" for path in (ROOT / "farm" / "client").glob("*.py")} - {
        "farm.client.__init__",
        "farm.client.local",
    }
    assert modules <= {*contract["source_modules"]}


def _runs_outside_the_farm(tree: ast.Module) -> bool:
    """Return whether variables configure it: it is a script, or runs in a sandbox and imports none of our code."""
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {name for name in imported if name.split(".")[0] in {"farm", "workers"}}
    is_script = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)
    return not ours or (is_script and "farm.settings" not in ours)


def _variables_read(node: ast.AST) -> list[str]:
    """Return the names of the environment variables that an expression reads, if they are literals."""
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
