"""A pytest plugin that reports each test's outcome to the process that started it; it imports nothing of the farm.

The outcomes go through an inherited pipe. Its number and a key come from a second pipe, which is read once, on import,
before any code of the tests or the policy, and then closed: neither is in the environment, an argument or a file. Each
signature covers all lines so far, so that an added, omitted or repeated line is detected outside. The key is held by an
object of OpenSSL, not by a Python object. Code that runs in this interpreter and searches it for that object could
still use it; the canaries detect that.

A test passed if its call passed and neither its set-up nor its tear-down failed. A report of "passed" for a call that
raised counts as failed.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Callable, Generator
from typing import Any

import pytest

_EXPECTED_FAILURE = "__unittest_expecting_failure__"


def _teller() -> Callable[[list[Any]], None]:
    """Return the function that signs and sends; in a process without the pipes it does nothing."""
    dumps, write, own_pid, pid = json.dumps, os.write, os.getpid, os.getpid()
    source = os.environ.pop("OUTCOMES_FD", "")
    # A pytest started by this one is not the run that counts.
    os.environ.pop("PYTEST_ADDOPTS", None)
    try:
        with open(int(source), "rb") as file:  # noqa: PTH123
            number, key = file.read().split(b" ")
        descriptor = int(number)
        os.set_inheritable(descriptor, False)
    except (OSError, ValueError):
        return lambda _: None
    signer = hmac.new(key, digestmod="sha256")
    del key

    def tell(record: list[Any]) -> None:
        if own_pid() != pid:
            return
        line = dumps(record).encode()
        signer.update(line)
        data = signer.hexdigest().encode() + b" " + line + b"\n"
        while data:
            data = data[write(descriptor, data) :]

    return tell


def _is_marked(item: Any) -> bool:
    """Return True if a test is expected to fail by its own mark, not by a call of the code under test."""
    method = getattr(item, "obj", None)
    return item.get_closest_marker("xfail") is not None or bool(getattr(method, _EXPECTED_FAILURE, False))


def _hooks() -> tuple[Callable[..., Any], Callable[..., Any]]:
    tell = _teller()

    def pytest_runtest_logreport(report: Any) -> None:
        """Report one line for each phase: `[node id, phase, outcome]`."""
        tell([report.nodeid, report.when, report.outcome])

    def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, None]:
        """Report a call that raised as failed, even if its report says that it passed; and a marked one as xfailed."""
        raised = call.excinfo is not None
        result = yield
        report = result.get_result()
        if raised and getattr(report, "outcome", "") == "passed":
            tell([item.nodeid, call.when, "failed"])
        if raised and hasattr(report, "wasxfail") and _is_marked(item):
            tell([item.nodeid, call.when, "xfailed"])

    return pytest_runtest_logreport, pytest_runtest_makereport


pytest_runtest_logreport, _makereport = _hooks()
pytest_runtest_makereport = pytest.hookimpl(hookwrapper=True)(_makereport)


def pytest_configure(config: Any) -> None:
    """Continue after failures, as some tests must fail, and omit tracebacks, which cost most."""
    config.option.maxfail = 0
    config.option.tbstyle = "no"
    os.environ.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)
