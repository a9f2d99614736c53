"""Outcomes of tests as reported by a sandbox, and the canaries among them. The evaluator trusts neither unchecked.

An outcome counts if its line is signed in the order it was sent. A run counts if every canary of every file that ran
behaves: those that must fail or pass do so, and skipped ones and mere look-alikes of tests have not passed.
"""

from __future__ import annotations

import hmac
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

Canaries = Mapping[str, Mapping[str, str]]
"""Expected outcomes by file and id within it: `passed`, `failed`, `skipped` or `absent`."""


class Outcomes:
    """The tests that ran and their outcomes, by node id. `forged` says why the lines are not the plugin's."""

    def __init__(self, ran: Collection[str], passed: Collection[str], failed: Collection[str] = (), forged: str = ""):
        self._passed = frozenset(passed)
        self._failed = frozenset(failed)
        self._ran = frozenset(ran)
        self.forged = forged
        self._by_name: defaultdict[str, set[str]] = defaultdict(set)
        for node_id in self._ran:
            self._by_name[name_of(node_id)].add(node_id)

    @classmethod
    def parse(cls, lines: bytes, key: bytes) -> Outcomes:
        """Parse the plugin's lines; a test passed if none of its phases failed. An incomplete last line is left out."""
        called: set[str] = set()
        failed: set[str] = set()
        seen: set[str] = set()
        signer = hmac.new(key, digestmod="sha256")
        for line in lines.split(b"\n")[:-1]:
            signature, _, record = line.partition(b" ")
            signer.update(record)
            if not hmac.compare_digest(signature, signer.hexdigest().encode()):
                return cls(seen, (), seen, "a line is not the plugin's")
            node_id, phase, outcome = json.loads(record)
            seen.add(node_id)
            if outcome == "failed":
                failed.add(node_id)
            elif phase == "call" and outcome == "passed":
                called.add(node_id)
        return cls(seen, called - failed, failed)

    def passed(self, test: str) -> bool:
        """Return True if a test of the instance passed.

        Data sets list inherited tests under the file or class that defines them, an id that pytest does not report.
        Such an id means every test of that name and those parameters: all that ran must have passed, and one must.
        """
        if test in self._ran:
            return test in self._passed
        same = self._by_name.get(name_of(test), set())
        return bool(same) and same <= self._passed

    def misbehaving(self, canaries: Canaries) -> list[str]:
        """Return the canaries without their expected outcome, each with its actual one."""
        return [
            f"{file}::{name} {became}, and must be {expected}"
            for file, expected_by_name in canaries.items()
            for here in [self._of(file)]
            if any(name not in expected_by_name for name in here)
            for name, expected in expected_by_name.items()
            if (became := here.get(name, "absent")) != expected
        ]

    def _of(self, file: str) -> dict[str, str]:
        """Return the outcomes of the tests of a file, by id within it; pytest's root may lie below the tree."""
        return {
            name: "failed" if node_id in self._failed else "passed" if node_id in self._passed else "skipped"
            for node_id in self._ran
            for path, _, name in [node_id.partition("::")]
            if file == path or file.endswith(f"/{path}")
        }

    def n_reported(self, canaries: Canaries) -> int:
        """Return the number of canaries with a reported outcome."""
        return sum(name in here for file, names in canaries.items() for here in [self._of(file)] for name in names)


def missing(outcomes: Outcomes, tests: Sequence[str]) -> list[str]:
    """Return the tests that did not pass."""
    return [test for test in tests if not outcomes.passed(test)]


def name_of(node_id: str) -> str:
    """Return the function and its parameters: `test_c[x::y]` of `a.py::TestB::test_c[x::y]`."""
    path, bracket, parameters = node_id.partition("[")
    return path.rpartition("::")[2] + bracket + parameters
