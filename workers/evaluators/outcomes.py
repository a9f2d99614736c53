"""Test outcomes as reported by a sandbox, and the canaries among them. The evaluator trusts neither unchecked.

An outcome counts if its line is signed, in the order of sending. A run counts if every canary of every file that ran
behaves: those that must fail or pass do so, and skipped ones and mere look-alikes of tests have not passed.
"""

from __future__ import annotations

import hmac
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

Canaries = Mapping[str, Mapping[str, str]]
"""Expected outcomes by file and id within it: `passed`, `failed`, `skipped` or `absent`."""


@dataclass(frozen=True, slots=True)
class Planted:
    """The tests that were added to those of an instance.

    `copies` maps each copy to its test, by file and ids within it; `uncopied` says why a test has none.
    """

    canaries: Canaries
    copies: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    uncopied: Mapping[str, str] = field(default_factory=dict)


class Outcomes:
    """The tests that ran and their outcomes, by node id. `forged` says why the lines are not from the plugin."""

    def __init__(
        self,
        ran: Collection[str],
        passed: Collection[str],
        failed: Collection[str] = (),
        forged: str = "",
        *,
        skipped: Collection[str] = (),
        xfailed: Collection[str] = (),
        failed_calls: Collection[str] = (),
    ) -> None:
        self._passed = frozenset(passed)
        self._failed = frozenset(failed)
        self._failed_calls = frozenset(failed_calls)
        self._ran = {node_id: number for number, node_id in enumerate(ran)}
        self._xfailed = frozenset(xfailed) - self._failed
        self._set_aside = (frozenset(skipped) - self._failed) | self._xfailed
        self.forged = forged
        self._by_name: defaultdict[str, set[str]] = defaultdict(set)
        for node_id in self._ran:
            self._by_name[name_of(node_id)].add(node_id)

    @classmethod
    def parse(cls, lines: bytes, key: bytes) -> Outcomes:
        """Parse the plugin's lines; a test passed if none of its phases failed. An incomplete last line is ignored."""
        called: set[str] = set()
        failed: set[str] = set()
        seen: dict[str, None] = {}
        failed_calls: set[str] = set()
        skipped: set[str] = set()
        xfailed: set[str] = set()
        signer = hmac.new(key, digestmod="sha256")
        for line in lines.split(b"\n")[:-1]:
            signature, _, record = line.partition(b" ")
            signer.update(record)
            if not hmac.compare_digest(signature, signer.hexdigest().encode()):
                return cls(seen, (), seen, "a line is not the plugin's")
            node_id, phase, outcome = json.loads(record)
            seen[node_id] = None
            if outcome == "failed":
                failed.add(node_id)
                if phase == "call":
                    failed_calls.add(node_id)
            elif phase == "call" and outcome == "passed":
                called.add(node_id)
            elif outcome == "xfailed":
                xfailed.add(node_id)
            elif phase == "setup" and outcome == "skipped":
                skipped.add(node_id)
        return cls(seen, called - failed, failed, skipped=skipped, xfailed=xfailed, failed_calls=failed_calls)

    def passed(self, test: str, may_xfail: bool = False) -> bool:
        """Return True if a test of the instance passed; with `may_xfail`, also if it failed as its own mark expects.

        Data sets list tests under ids that pytest does not report. An inherited test is listed under the file or class
        that defines it: this matches every test with that name and parameters. An id with parameters may be cut at a
        space: this matches every test whose id begins with it. A test with a path as its parameter may be listed with
        only its last part. All matching tests must have passed, and there must be one; for a cut id, tests that their
        own marks skip, or expect to fail, are ignored.
        """
        good = self._passed | self._xfailed if may_xfail else self._passed
        if same := self._named(test):
            return same <= good
        meant = self._abbreviated(test)
        return not meant.isdisjoint(good) and meant <= good | self._set_aside

    def _named(self, test: str) -> set[str]:
        """Return the ids of the tests that match a complete id, possibly of an inherited test."""
        return {test} if test in self._ran else self._by_name.get(name_of(test), set())

    def _abbreviated(self, test: str) -> set[str]:
        """Return the ids of the tests that match an abbreviated id; by name if none in its file begins with it."""
        name = name_of(test)
        if "[" not in name:
            return set()
        function, _, parameter = name.partition("[/")
        last = f"/{parameter}"
        return (
            {node_id for node_id in self._ran if node_id.startswith(test)}
            or {node_id for ran_name, ids in self._by_name.items() if ran_name.startswith(name) for node_id in ids}
            or {
                node_id
                for ran_name, ids in self._by_name.items()
                if parameter and ran_name.startswith(f"{function}[/") and ran_name.endswith(last)
                for node_id in ids
            }
        )

    @property
    def has_passes(self) -> bool:
        """True if any test passed, or failed as its own mark expects: only a working runner reports this."""
        return bool(self._passed or self._xfailed)

    def misbehaving(self, canaries: Canaries) -> list[str]:
        """Return the canaries without their expected outcome, each with its actual one."""
        return [
            f"{file}::{name} {became}, and must be {expected}"
            for file, expected_by_name in canaries.items()
            for outcomes in [self._of(file)]
            if any(name not in expected_by_name for name in outcomes)
            for name, expected in expected_by_name.items()
            if (became := outcomes.get(name, "absent")) != expected
        ]

    def passing_copies(self, planted: Planted) -> dict[str, bool]:
        """Return the tests whose copies passed, though each copy must fail, and whether the tests passed, too."""
        return {
            f"{file}::{test}": outcomes.get(test) == "passed"
            for file, tests in planted.copies.items()
            for outcomes in [self._of(file)]
            for name, outcome in outcomes.items()
            for function, bracket, parameters in [name.partition("[")]
            if function in tests and outcome == "passed"
            for test in [tests[function] + bracket + parameters]
        }

    def n_failing_copies(self, planted: Planted) -> int:
        """Return the number of copied tests with a copy that failed as it must, in its body."""
        return len(
            {
                (file, name.partition("[")[0])
                for node_id in self._failed_calls
                for file, name in self._copies(node_id, planted)
            }
        )

    def may_be_disturbed(self, tests: Sequence[str], planted: Planted) -> bool:
        """Return True if copies may have disturbed all of these tests: each ran after one, or did not run."""
        copies = [number for node_id, number in self._ran.items() if self._copies(node_id, planted)]
        first = min(copies, default=len(self._ran))
        meant = [node_id for test in tests for node_id in self._named(test) or self._abbreviated(test)]
        return all(self._ran[node_id] > first for node_id in meant)

    def _copies(self, node_id: str, planted: Planted) -> list[tuple[str, str]]:
        """Return the file and the id within it if a test is a copy."""
        path, _, name = node_id.partition("::")
        return [
            (file, name)
            for file, tests in planted.copies.items()
            if name.partition("[")[0] in tests and (file == path or file.endswith(f"/{path}"))
        ]

    def _of(self, file: str) -> dict[str, str]:
        """Return the outcomes of a file's tests, by id within it; pytest's root may be below the tree."""
        return {
            name: "failed" if node_id in self._failed else "passed" if node_id in self._passed else "skipped"
            for node_id in self._ran
            for path, _, name in [node_id.partition("::")]
            if file == path or file.endswith(f"/{path}")
        }

    def n_reported(self, canaries: Canaries) -> int:
        """Return the number of canaries with a reported outcome."""
        return sum(
            name in outcomes for file, names in canaries.items() for outcomes in [self._of(file)] for name in names
        )


def missing(outcomes: Outcomes, tests: Sequence[str], may_xfail: Collection[str] = ()) -> list[str]:
    """Return the tests that did not pass; those of `may_xfail` may have failed as their own marks expect."""
    return [test for test in tests if not outcomes.passed(test, test in may_xfail)]


def name_of(node_id: str) -> str:
    """Return the function and its parameters: `test_c[x::y]` of `a.py::TestB::test_c[x::y]`."""
    path, bracket, parameters = node_id.partition("[")
    return path.rpartition("::")[2] + bracket + parameters
