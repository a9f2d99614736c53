"""Copies of tests fail where the tests pass, for any tests, and do not disturb the rest of their file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workers.evaluators.program_source import source_of

HONEST = '''import asyncio
import contextlib
import itertools
import unittest

import pytest

CASES = ["a", "the b"]
numbers = itertools.count()


@pytest.fixture
def resource():
    yield [1]
    assert CASES


def test_plain(resource):
    """A test."""
    text = """
  of several lines"""
    assert len(text) == 19  # the end


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", range(2))
def test_parametrized(case, n, tmp_path): assert case in CASES; assert n < 2


def test_without_assertion():
    sorted(CASES)


def test_raises():
    with pytest.raises(ValueError, match="x"):
        int("x")


def test_in_loop_that_never_runs():
    for case in []:
        assert case


def test_in_try():
    try:
        assert CASES
    except AssertionError:
        pass


def test_first_time():
    assert next(numbers) in (0, 1, 2)


def test_returns_early():
    if CASES:
        return
    assert CASES is None


def test_returns_last():
    assert CASES
    return None


def test_returns_within_try():
    with contextlib.suppress(Exception):
        return


def test_brackets():
    assert (
        len(CASES) or
        0
    ) == 2


def test_literal_first():
    assert 2 == len(CASES)


def test_umlaut(): assert "ü" == "ü"


async def test_async():
    assert await asyncio.sleep(0, 1) == 1


def test_skipped():
    pytest.skip("none")


@pytest.mark.xfail
def test_expected_to_fail():
    assert not CASES


def test_yields():
    def inner():
        yield 1
        return 2
    assert list(inner()) == [1]


class TestPlain:
    N = 3
    seen: list = []

    @pytest.mark.parametrize("case", CASES)
    def test_method(self, case):
        self.seen.append(case)
        assert (
            self.N
            == 3
        )

    @pytest.mark.parametrize("n", [N])
    def test_of_its_class(self, n):
        assert n == self.N

    def test_super(self):
        assert super().__init__() is None

    def test_private(self):
        self.__value = 1
        assert self.__value == 1

    @staticmethod
    def test_static():
        assert CASES[0] == "a"


class TestInherits(TestPlain):
    pass


@pytest.mark.usefixtures("resource")
class TestMarked:
    def test_marked(self):
        assert [*"ab"] == ["a", "b"]


class TestUnit(unittest.TestCase):
    def setUp(self):
        self.value = 5

    def test_equal(self):
        self.assertEqual(self.value, 5)

    def test_equal_literal_first(self):
        self.assertEqual("x", str("x"), msg="no")

    def test_sub(self):
        for n in range(2):
            with self.subTest(n=n):
                self.assertLess(n, 2)

    @unittest.expectedFailure
    def test_fails(self):
        self.fail()


class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_it(self):
        self.assertTrue(await asyncio.sleep(0, True))


def test_lines():
    with open(__file__) as file:
        lines = file.read().split("\\n")
    assert lines[test_lines.__code__.co_firstlineno - 1] == "def test_lines():"
'''
CONFTEST = """
import asyncio, inspect, pytest
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        asyncio.run(pyfuncitem.obj())
        return True
"""
UNCOPIED = {
    "test_returns_within_try": "it returns within `try` or `with`",
    "TestPlain::test_of_its_class": "its decorators or defaults are of its class",
    "TestPlain::test_super": "it depends on the class that it is defined in",
    "TestPlain::test_private": "it depends on the class that it is defined in",
    "TestInherits::test_method": "it is inherited, generated, or defined within another statement",
}


def planted(folder: Path, text: str, tests: list[str]) -> dict[str, Any]:
    """Insert copies in a file, as in a sandbox, and return the answer."""
    (folder / "test_x.py").write_text(text)
    job = {"tree": str(folder), "tests": ["test_x.py"], "copied": [f"test_x.py::{test}" for test in tests]}
    command = [sys.executable, "-I", "-c", source_of("canaries")]
    done = subprocess.run(command, input=json.dumps(job).encode(), capture_output=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def outcomes(folder: Path) -> dict[str, str]:
    """Run pytest; return the outcomes of the file's tests."""
    command = [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_x.py"]
    run = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", str(folder)], cwd=folder, capture_output=True, text=True
    )
    lines = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL|SKIPPED) test_x\.py::(.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    assert lines, run.stdout + run.stderr
    return {name: outcome for outcome, name in lines}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("before")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_x.py").write_text(HONEST)
    return outcomes(folder)


# a copy's place and its last assertion are drawn at random
@pytest.mark.parametrize("_time", range(3))
def test_copies_fail_where_their_tests_pass_and_disturb_none(
    _time: int, tmp_path: Path, before: dict[str, str]
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    functions = list(dict.fromkeys(name.partition("[")[0] for name in before))
    answer = planted(tmp_path, HONEST, functions)
    copies: dict[str, str] = answer["copies"]["test_x.py"]
    after = outcomes(tmp_path)
    assert {name: after.get(name) for name in before} == before
    uncopied = {test.partition("::")[2]: why for test, why in answer["uncopied"].items()}
    assert {test: uncopied.get(test) for test in UNCOPIED} == UNCOPIED
    assert {*copies.values()} == {*functions} - {*uncopied}
    for copy, test in copies.items():
        parameters = [name.removeprefix(test) for name in before if name.partition("[")[0] == test]
        expected = {p: "FAILED" if before[test + p] == "PASSED" else before[test + p] for p in parameters}
        assert {p: after.get(copy + p) for p in parameters} == expected, (copy, test)


def test_some_copies_run_before_their_tests(tmp_path: Path) -> None:
    text = "import os\n\n\ndef test_one():\n    assert os\n\n\ndef test_two():\n    assert os\n"
    places = set()
    for _ in range(40):
        [copy] = planted(tmp_path, text, ["test_two"])["copies"]["test_x.py"]
        source = (tmp_path / "test_x.py").read_text()
        assert source.startswith("import os")
        places.add(f"import os; {copy} = None\n" in source)
    assert places == {True, False}


@pytest.mark.parametrize(
    ("test", "ends"),
    [
        ("def test_a():\n    assert f(1) == 5", r"assert f\(1\) == '\w+'"),
        ("def test_a():\n    assert f(1) == 'x'", r"assert f\(1\) == \d+"),
        ("def test_a():\n    assert (f(1) or 2) == [1]", r"assert \(f\(1\) or 2\) == '\w+'"),
        ("def test_a():\n    assert f(1) == g(1)", r"assert .+"),
        ("def test_a():\n    f(1)", r"assert .+"),
        ("def test_a(): f(1)", r"def test_\w+\(\): f\(1\); assert .+"),
        ("def test_a():\n\tf(1)", r"\tassert .+"),
        (
            "class T:\n  def test_a(self):\n    self.assertEqual(f(1), 5, 'no')",
            r"self.assertEqual\(f\(1\), '\w+'\)\n  T\.test_\w+ = test_\w+\n  del test_\w+",
        ),
        (
            "class T:\n  def test_a(self):\n    self.assertEqual(5, f(1))",
            r"self.assertEqual\('\w+', f\(1\)\)\n  T\.test_\w+ = test_\w+\n  del test_\w+",
        ),
    ],
)
def test_last_assertion_of_a_copy_fails(test: str, ends: str, tmp_path: Path) -> None:
    planted(tmp_path, test + "\n", ["T::test_a" if test.startswith("class") else "test_a"])
    assert re.search(rf"{ends}\n*\Z", (tmp_path / "test_x.py").read_text())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def test_a():\n    pass\n\n\ndef test_a():\n    pass\n", "its name is bound more than once"),
        ("class T:\n    def test_a(self): pass\n\n\ndel T\n", "its name is bound more than once"),
        ("def test_a():\n    pass\n\n\ntest_a = wrapped(test_a)\n", "its name is bound more than once"),
        ("@given(1)\ndef test_a(): pass\n", "it would be run once for each example"),
        ("@patch('x')\nclass T:\n    def test_a(self): pass\n", "its class has a decorator"),
        ("def test_a():\n    yield 1\n", "it is a generator"),
        ("def test_a():\n    x = '''\r'''\n", "its file has other ends of lines"),
        ("test_a = 1\n", "it is inherited, generated, or defined within another statement"),
        ("if 1:\n    def test_a(): pass\n", "it is inherited, generated, or defined within another statement"),
    ],
)
def test_test_that_cannot_be_copied_soundly_has_no_copy(text: str, why: str, tmp_path: Path) -> None:
    test = "T::test_a" if "class T" in text else "test_a"
    answer = planted(tmp_path, text, [test])
    assert (answer["copies"], answer["uncopied"]) == ({}, {f"test_x.py::{test}": why})
