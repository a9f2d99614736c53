"""A failed test is rerun once at the end, without parallel tests; one that passes then leaves the run green."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests import rerun

def pytest_configure(config):
    if rerun.is_enabled(config):
        config.pluginmanager.register(rerun.Rerun())
"""
FIRST = """
def first(name):
    from pathlib import Path
    seen = Path(__file__).with_name(name + ".seen")
    return not seen.exists() and (seen.touch() or True)
"""
SLOW = """
def test_slow():
    import pathlib, time
    time.sleep(3)
    pathlib.Path("slow.ended").touch()
"""
PASSES = "def test_passes():\n    pass\n"
FLAKY = "def test_flaky():\n    assert not first('flaky'), 'of the first run'\n"
FAILS = "def test_fails():\n    assert False\n"
SKIPPED_THEN = (
    "def test_skipped():\n    import pytest\n    if not first('skipped'): pytest.skip('absent')\n    assert False\n"
)
BY_PARAMETER = """
import pytest
@pytest.mark.parametrize("name", ["a::b", "c[d] e", "ü/f"])
def test_flaky_parameter(name):
    assert not first(str(hash(name) and len(name)) + name[0])
"""
SET_UP = """
import pytest
@pytest.fixture
def fixture():
    assert not first("fixture")
def test_set_up(fixture):
    pass
"""
OF_MODULE = """
import pytest
@pytest.fixture(scope="module")
def common():
    import os
    assert os.environ["RERUN"] == "0", "in the set-up of each worker"
@pytest.mark.parametrize("number", range(7))
def test_of_module(common, number):
    pass
"""
CLEAN_UP = """
import pytest
@pytest.fixture
def cleaned():
    yield
    assert not first("cleaned")
def test_clean_up(cleaned):
    pass
"""
DIES = "def test_dies():\n    import os\n    if first('dies'): os._exit(3)\n"
ALONE = """
def test_alone():
    from pathlib import Path
    assert not first("alone")
    assert Path("slow.ended").exists()
"""


_ONE_PLUGIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
"""Loading the others takes half of pytest's start time."""


def run(folder: Path, *tests: str, n: int = 2, **env: str) -> tuple[int, str]:
    """Run a project of these tests, each in its own file; return pytest's exit status and output."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST)
    for number, test in enumerate(tests):
        (folder / f"test_{number}.py").write_text(FIRST + test)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(n), "-p", "no:cacheprovider", "-ra"],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "RERUN": "1", **_ONE_PLUGIN, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


def test_tests_that_pass_when_rerun_are_listed_as_flaky(tmp_path: Path) -> None:
    """A failure in a set-up, in a clean-up, of a whole worker, and one that lasts while another test runs."""
    code, output = run(tmp_path, SET_UP, CLEAN_UP, DIES, ALONE, SLOW, PASSES)
    assert code == 0, output
    for number, name in enumerate(("set_up", "clean_up", "dies", "alone")):
        assert f"FLAKY test_{number}.py::test_{name}\n" in output
    assert "FAILED" not in output
    assert "2 passed, 4 flaky in" in last_line(output)


def test_parametrized_ids_with_any_text_are_rerun(tmp_path: Path) -> None:
    code, output = run(tmp_path, BY_PARAMETER, FLAKY, n=0)
    assert code == 0, output
    assert "of the first run" in output
    assert "4 flaky in" in last_line(output)


def test_tests_that_do_not_pass_when_rerun_fail_the_run(tmp_path: Path) -> None:
    """A test that fails twice, and one that is skipped the second time."""
    code, output = run(tmp_path, FAILS, SKIPPED_THEN, FLAKY)
    assert code == 1, output
    assert "FAILED test_0.py::test_fails" in output
    assert "FAILED test_1.py::test_skipped" in output
    assert "2 failed, 1 flaky in" in last_line(output)


def test_failures_over_the_limit_are_not_rerun(tmp_path: Path) -> None:
    code, output = run(tmp_path, *(FLAKY.replace("'flaky'", f"'{number}'") for number in range(6)), n=0)
    assert code == 1, output
    assert "6 tests failed, more than 5: none is run again" in output
    assert "6 failed in" in last_line(output)


def test_failed_module_set_up_is_rerun_once(tmp_path: Path) -> None:
    code, output = run(tmp_path, OF_MODULE, PASSES)
    assert code == 0, output
    assert output.count("running again, by itself: ") == 1
    assert "1 passed, 7 flaky in" in last_line(output)


def test_file_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    code, output = run(tmp_path, "import no_such_module\n", PASSES, n=1)
    assert code != 0, output


def test_rerun_is_off_by_default(tmp_path: Path) -> None:
    code, output = run(tmp_path, FLAKY, n=0, RERUN="0")
    assert code == 1, output
    assert "1 failed in" in last_line(output)
