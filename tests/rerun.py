"""Reruns each failed test of a run once, after all others have ended, without parallel tests.

A test that passes then is counted as `flaky`, with the text of its failure, and leaves the run green; one that fails
twice leaves it red. Tests of a module whose common set-up failed are one failure, and are rerun together. `make test`
enables it by RERUN=1 in the environment. pytest-rerunfailures repeats a test at once, in parallel with the others,
whose load is the usual cause.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

MOST_FLAKY = 5
"""With more failures nothing is rerun: then the change is wrong, not a test."""

_FLAKY = "flaky"
_WORKER = re.compile(r"^\[gw\d+\].*\n")


def is_enabled(config: pytest.Config) -> bool:
    """Tell whether this process reruns failed tests: a worker of pytest-xdist does not."""
    return os.environ.get("RERUN", "0") != "0" and not hasattr(config, "workerinput")


class Rerun:
    """The pytest plug-in for reruns."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Rerun failed tests, unless the run was interrupted or tests could not be collected."""
        result = yield
        terminal: pytest.TerminalReporter | None = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None:
            return result
        failed = [*terminal.stats.get("failed", []), *terminal.stats.get("error", [])]
        if not failed or not all(isinstance(report, pytest.TestReport) for report in failed):
            return result
        groups = _groups(failed)
        if len(groups) > MOST_FLAKY:
            terminal.write_line("")
            terminal.write_line(f"{len(groups)} tests failed, more than {MOST_FLAKY}: none is run again")
            return result
        for names in groups:
            terminal.write_line("")
            terminal.write_line(f"running again, by itself: {', '.join(names)}")
            passed, output = _run(session.config.rootpath, names)
            if passed:
                terminal.write_line("passed")
                session.testsfailed -= sum(_count_as_flaky(terminal.stats, name) for name in names)
            else:
                terminal.write_line(output)
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the flaky tests, each with the failure of its first run."""
        reports = terminalreporter.stats.get(_FLAKY, [])
        if not reports:
            return
        terminalreporter.section("flaky: failed, then passed by itself; to be fixed at the cause", yellow=True)
        for report in reports:
            terminalreporter.write_line(f"FLAKY {report.nodeid}")
            terminalreporter.write_line(report.longreprtext)


def _groups(failed: Sequence[pytest.TestReport]) -> list[list[str]]:
    """Return the names of failed tests, each separately except those of a module whose set-up failed alike."""
    groups: dict[tuple[str, str], list[str]] = {}
    grouped: set[str] = set()
    for report in failed:
        if report.nodeid not in grouped:
            grouped.add(report.nodeid)
            # without the line in which pytest-xdist names its worker
            why = _WORKER.sub("", report.longreprtext, count=1)
            common = (report.nodeid.partition("::")[0], why) if report.when == "setup" else (report.nodeid, "")
            groups.setdefault(common, []).append(report.nodeid)
    return list(groups.values())


def _run(root: Path, names: Sequence[str]) -> tuple[bool, str]:
    """Run these tests in a separate process; return whether all passed (a skip is no pass), and the output."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        options = ["-n", "0", "-p", "no:cacheprovider", "-q", f"--junitxml={results}"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *names],
            cwd=root,
            env=os.environ | {"RERUN": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        return run.returncode == 0 and results.exists() and _n_passed(results) == len(names), run.stdout


def _n_passed(results: Path) -> int:
    (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
    return int(suite.attrib["tests"]) - sum(int(suite.attrib[each]) for each in ("failures", "errors", "skipped"))


def _count_as_flaky(stats: dict[str, list[pytest.TestReport]], name: str) -> int:
    """Move the first failure of this test to `flaky` and drop its other reports; return the number of failures."""
    failures = [
        report for category in ("failed", "error") for report in stats.get(category, []) if report.nodeid == name
    ]
    for category in ("passed", "failed", "error"):
        stats[category] = [report for report in stats.get(category, []) if report.nodeid != name]
        if not stats[category]:
            del stats[category]
    stats.setdefault(_FLAKY, []).append(failures[0])
    return len(failures)
