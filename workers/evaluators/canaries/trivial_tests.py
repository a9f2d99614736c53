"""Tests that do nothing, named like the listed ones: they pass wherever pytest works and outcomes can be read."""

from __future__ import annotations

from collections.abc import Iterable

TRIVIAL = "def test_trivial():\n    pass\n"
"""The file of a trivial test, if no name is known."""


def trivial_tests(ids: Iterable[str]) -> dict[str, str]:
    """Return, by path, files with a trivial test for each of these pytest ids.

    A test of a class is put into a `unittest.TestCase`, which pytest collects under any name.
    """
    found: dict[str, dict[str, None]] = {}
    for test in ids:
        path, _, name = test.partition("[")[0].partition("::")
        found.setdefault(path, {})[_definition(name)] = None
    return {path: "import unittest\n" + "".join(definitions) for path, definitions in found.items()}


def _definition(name: str) -> str:
    *classes, function = name.split("::")
    if not all(part.isidentifier() for part in (*classes, function)):
        return f"\n\n{TRIVIAL}"
    if not classes:
        return f"\n\ndef {function}():\n    pass\n"
    return f"\n\nclass {classes[0]}(unittest.TestCase):\n    def {function}(self):\n        pass\n"
