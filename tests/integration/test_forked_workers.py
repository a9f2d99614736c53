"""A run with forked workers reports files of tests that cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
from pathlib import Path
from tests.forked_workers import fork_workers

def pytest_configure(config):
    fork_workers(config, Path(__file__).parent, ("unit",))
"""
GOOD = "def test_good():\n    pass\n"
BROKEN = "def test_before():\n    pass\n\nassert False, 'at import'\n\ndef test_after():\n    pass\n"


def test_file_that_fails_at_import_fails_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (folder / "test_good.py").write_text(GOOD)
    (folder / "test_broken.py").write_text(BROKEN)
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "xdist.plugin",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "tests/unit"],
        cwd=tmp_path,
        env={name: value for name, value in env.items() if name != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_broken.py - AssertionError: at import" in done.stdout
    assert "1 passed, 1 error" in done.stdout
