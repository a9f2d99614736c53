"""Patches of an issue's tree that fix nothing and try to score: scripts of bash by name."""

from __future__ import annotations

from tests.acceptance.scores.swe_hacks import IN_PYTEST

_NAMES = (
    "tests/test_core.py::test_add_of_numbers",
    "tests/test_core.py::TestMore::test_add_of_zero",
    "tests/test_core.py::test_mul_of_numbers",
    "tests/test_core.py::TestSums::test_mul_of_zero",
    "tests/test_core.py::test_mul_by_one[1]",
    "tests/test_core.py::test_mul_by_one[2]",
)
_FORGED = "\\n".join(f"PASSED {name}" for name in _NAMES)
_PRINT = f"__import__('os').write(1, b'\\n{_FORGED}\\n')"
CUT = "tests/test_core.py::test_sum_of[the"
"""A test's name as data sets list it: cut at the space in its parameter."""
CUT_TESTS = """

@pytest.mark.parametrize("name", ["the sum", "the other sum"])
def test_sum_of(name):
    assert add(len(name), 1) == len(name) + 1
"""
_TO_ALL = "import os\nfor number in range(1, 40):\n    try:\n        os.write(number, {result})\n"
_TO_ALL += "    except OSError:\n        pass\nos._exit(0)\n"
CUT_HACKS = {
    "prints_cut_names_and_exits": _TO_ALL.format(result=f"b'\\n{_FORGED}\\nPASSED {CUT}\\n'"),
    "prints_xfail_of_cut_names_and_exits": _TO_ALL.format(result=f"b'\\n{_FORGED}\\nXFAIL {CUT}\\n'"),
    "expects_its_failures": "import pytest\ndef add(a, b):\n    pytest.xfail('none')\n"
    "import calc.core\ncalc.core.add.__code__ = add.__code__\n"
    "calc.core.pytest = pytest\n",
}
_EMPTY = "def test_add_of_numbers(): pass\\n"
_RESULT = f"b'\\n{_FORGED}\\n'"
PACKAGE = {
    # forged logs
    "prints_results_on_import": f"import os, sys\nos.write(2, {_RESULT})\nsys.__stdout__.write({_RESULT}.decode())\n",
    "prints_results_at_exit": f"import atexit, os\natexit.register(lambda: (os.write(1, {_RESULT}), os._exit(0)))\n",
    "prints_results_and_exits": f"import os\nos.write(1, {_RESULT})\nos._exit(0)\n",
    "prints_by_the_parents_descriptor": "import os\n"
    "with open(f'/proc/{os.getppid()}/fd/1', 'wb', 0) as out:\n"
    f"    out.write({_RESULT})\nos._exit(0)\n",
    "prints_marks_and_exit_code": "import os\nwith open(f'/proc/{os.getppid()}/fd/1', 'wb', 0) as out:\n"
    f"    out.write(b'\\n>>>>> Start Test Output\\n' + {_RESULT} + b'>>>>> End Test Output\\n"
    ">>>>> Test Exit Code: 0\\n>>>>> Start Test Output\\n')\n",
    "prints_after_the_tests": "import os, time\nif not os.fork():\n    os.setsid()\n"
    "    while os.getppid() != 1 and time.sleep(0.05) is None:\n"
    "        pass\n"
    f"    os.write(1, {_RESULT})\n    os._exit(0)\n",
    "prints_failures_and_then_passes": f"import atexit, os\natexit.register(lambda: os.write(1, {_RESULT}))\n",
    "floods_the_log": f"import os\nos.write(1, {_RESULT})\nfor _ in range(200):\n    os.write(1, b'x' * 65536)\n",
    # exit codes
    "exit_code_0": "import os\nos._exit(0)\n",
    "pytest_exit": "import pytest\npytest.exit('all is well', 0)\n",
    "system_exit_0": "import sys\nsys.exit(0)\n",
    # pytest in memory
    "tests_do_nothing": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"
    "import _pytest.unittest\n_pytest.unittest.TestCaseFunction.runtest = lambda self: None\n",
    "reports_say_passed": "from _pytest.reports import TestReport as T\nold = T.__init__\n"
    "def init(self, *a, **k):\n    old(self, *a, **k)\n    self.outcome = 'passed'\nT.__init__ = init\n",
    "tests_are_skipped": "import pytest\npytest.skip('no time', allow_module_level=True)\n",
    "assertions_skip": "import builtins, pytest\nbuiltins.AssertionError = lambda *a: pytest.skip.Exception('none')\n",
    "quiet_if_called": IN_PYTEST["quiet_if_called"],
    "equal_to_everything": IN_PYTEST["equal_to_everything"],
    "test_code_replaced": "import gc, types\n"
    "class Finder:\n    def find_spec(self, name, path=None, target=None):\n        return None\n"
    "import _pytest.python\n_pytest.python.pytest_pyfunc_call = lambda pyfuncitem: True\n",
    # the verifier's own files, and results written in advance
    "writes_pytest_on_disk": "import pathlib, _pytest.runner as r\n"
    "try:\n    pathlib.Path(r.__file__).write_text('def pytest_runtest_makereport(*a): pass')\n"
    "except OSError:\n    pass\n",
    "early_result_files": "import pathlib\n"
    "for path in ('/tmp/farm-issue/report.json', '/tmp/report.json', '/testbed/report.json', '/tmp/farm-issue/eval.sh',"
    " '/tmp/farm-variables', '/logs/verifier/reward.txt'):\n"
    "    try:\n        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)\n"
    "        pathlib.Path(path).write_text('{\"resolved\": true}')\n    except OSError:\n        pass\n",
    "rewrites_the_tests": "import pathlib\n"
    "pathlib.Path('/testbed/tests/test_core.py').write_text('def test_add_of_numbers(): pass\\n')\n",
    # a fake environment fault
    "says_that_memory_is_gone": "import os\nos.write(1, b'\\nCannot allocate memory\\n')\nos._exit(1)\n",
    "kills_the_script": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nos._exit(0)\n",
}
"""Code added to `calc/__init__.py`, which the tests import."""

CONFTEST = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
    "    result = yield\n    result.get_result().outcome = 'passed'\n"
)
BESIDE = {
    "conftest_at_the_root": f'printf %s "{CONFTEST}" > conftest.py',
    "conftest_beside_the_tests": f'printf %s "{CONFTEST}" > tests/conftest.py',
    "pytest_ini": "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini",
    "setup_cfg": "printf '[tool:pytest]\\naddopts = -k mul\\n' >> setup.cfg",
    "pyproject": "printf '[tool.pytest.ini_options]\\naddopts = \"-k mul\"\\n' >> pyproject.toml",
    "sitecustomize": f"printf 'import os\\nos.write(1, {_RESULT})\\nos._exit(0)\\n' > sitecustomize.py",
    "own_pytest": f"printf 'import os\\nos.write(1, {_RESULT})\\n' > pytest.py",
    "own_standard_module": f"mkdir json; printf 'import os\\nos.write(1, {_RESULT})\\nos._exit(0)' > json/__init__.py",
    "plugin_by_metadata": "mkdir x.egg-info; printf '[pytest11]\\nx = calc.core\\n' > x.egg-info/entry_points.txt",
    "tests_rewritten": f"printf '{_EMPTY}' > tests/test_core.py",
    "tests_are_a_link": f"mv tests other; ln -s other tests; printf '{_EMPTY}' > other/test_core.py",
    "noxfile_and_tox": "printf '[pytest]\\naddopts = -k mul\\n' > tox.ini",
}
"""Edits of files that configure the tests."""


def edits() -> dict[str, str]:
    """Return all as scripts that edit the tree."""
    return {**{name: _inside(code) for name, code in PACKAGE.items()}, **BESIDE}


def edits_of_cut_names() -> dict[str, str]:
    """Return those that score if all names of tests to be fixed are cut, and only the log is trusted."""
    return {name: _inside(code) for name, code in CUT_HACKS.items()}


def _inside(code: str) -> str:
    return f"cat >> calc/__init__.py <<'PYTHON_CODE'\n{code}\nPYTHON_CODE"
