"""The swebench library passes its own tests as it is loaded here."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from farm.errors import EvaluatorError
from tests.conftest import absent
from workers.config import own_config
from workers.evaluators.issues.library import library_folders

_OWN_TESTS = """
import sys
import pytest
from unittest.mock import MagicMock
from workers.evaluators.issues import library_program
library_program.load({folders})
for name in ("docker", "datasets", "dotenv", "tqdm", "modal", "docker.models", "docker.models.containers"):
    sys.modules[name] = MagicMock()
options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir=/", "-c", "/dev/null"]
sys.exit(pytest.main([*options, *{tests}]))
"""


def test_library_passes_its_own_tests() -> None:
    try:
        folders = asyncio.run(library_folders(own_config().sandboxes))
    except EvaluatorError as error:
        absent(str(error))
    own = Path(folders[0], "tests")
    patterns = ("log_parsers_*", "grading_*")
    tests = [str(path) for pattern in patterns for path in own.glob(f"test_{pattern}.py")]
    assert len(tests) >= 8
    program = _OWN_TESTS.format(folders=folders, tests=tests)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, "-B", "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[4-9]\d passed", done.stdout, re.MULTILINE), done.stdout
