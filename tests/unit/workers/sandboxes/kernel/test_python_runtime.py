"""The packages of the farm's environment that are copied into a sandbox."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workers.sandboxes.kernel import python_runtime
from workers.sandboxes.kernel.python_runtime import PROGRAMS, closure, own_modules


def test_closure_has_ipython_and_its_imports() -> None:
    names = set(closure("IPython"))
    assert {"ipython", "traitlets", "prompt-toolkit", "stack-data", "executing"} <= names


def test_closure_has_no_extras() -> None:
    assert not {"pytest", "numpy", "jupyter-client", "rollout-farm"} & set(closure("IPython"))


def test_package_for_another_platform_is_ignored() -> None:
    assert closure("no-such-distribution") == {}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_find_all_their_imports(program: str, tmp_path: Path) -> None:
    for file, source in own_modules().items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import {program}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, tmp_path], check=True)


def test_only_imported_modules_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "workers/__init__.py": "",
        "workers/a.py": "import json, other\nfrom workers.new import deep, name\n",
        "workers/new/__init__.py": "name = 1\n",
        "workers/new/deep.py": "from workers import a\ndef late():\n    import workers.late.one.module as module\n",
        "workers/late/__init__.py": "import workers.of_package\n",
        "workers/late/one/__init__.py": "",
        "workers/late/one/module.py": "import farm.records\n",
        "workers/of_package.py": "",
        "farm/__init__.py": "",
        "farm/records.py": "",
    }
    others = dict.fromkeys(("workers/never.py", "workers/new/never.py", "other.py", "json.py"), "")
    for file, source in {**files, **others}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    monkeypatch.setattr(python_runtime, "_PROJECT", tmp_path)
    monkeypatch.setattr(python_runtime, "PROGRAMS", ("workers.a",))
    assert own_modules() == files
