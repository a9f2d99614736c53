"""Runs each failed test of a run once more, when all others have ended, with nothing beside it.

A test that passes then is counted as `flaky`, with the text of its failure, and leaves the run green; one that fails
twice leaves it red. `make test` asks for it by RERUN=1 in the environment. pytest-rerunfailures repeats a test at once,
beside the others, whose load is the usual cause.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from xml.etree import ElementTree

import pytest

MOST_FLAKY = 5
"""With more failed tests than these nothing is run again: the change is wrong, not a test."""

_FLAKY = "flaky"


def is_asked_for(config: pytest.Config) -> bool:
    """Tell whether this process reruns failed tests: a worker of pytest-xdist does not."""
    return os.environ.get("RERUN", "0") != "0" and not hasattr(config, "workerinput")


class Rerun:
    """The plug-in of pytest that does it."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Rerun what failed, unless the run was interrupted or tests could not be collected."""
        result = yield
        terminal: pytest.TerminalReporter | None = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None:
            return result
        failed = [*terminal.stats.get("failed", []), *terminal.stats.get("error", [])]
        names = list(dict.fromkeys(report.nodeid for report in failed))
        if not names or not all(isinstance(report, pytest.TestReport) for report in failed):
            return result
        if len(names) > MOST_FLAKY:
            terminal.write_line("")
            terminal.write_line(f"{len(names)} tests failed, more than {MOST_FLAKY}: none is run again")
            return result
        for name in names:
            terminal.write_line("")
            terminal.write_line(f"running again, by itself: {name}")
            passed, output = _run(session.config.rootpath, name)
            if passed:
                terminal.write_line("passed")
                session.testsfailed -= _count_as_flaky(terminal.stats, name)
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


def _run(root: Path, name: str) -> tuple[bool, str]:
    """Run this test in a process of its own; return whether it passed (a skip is no pass), and what was printed."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        options = ["-n", "0", "-p", "no:cacheprovider", "-q", f"--junitxml={results}"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, name],
            cwd=root,
            env=os.environ | {"RERUN": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        return run.returncode == 0 and results.exists() and _n_passed(results) == 1, run.stdout


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
