"""Code that forges the outcomes of tests from within the package under test: in pipes, files, printed text."""

from __future__ import annotations

from workers.attacks.attack import of_class

_FORGE = """
import gc, json, os
def forge():
    ids = [i.nodeid for i in gc.get_objects() if type(i).__name__ in ("Function", "TestCaseFunction")]
    return "".join(json.dumps([i, p, "passed"]) + "\\n" for i in ids for p in ("setup", "call", "teardown")).encode()
"""
FORGED: dict[str, tuple[str, str]] = of_class(
    "forged-report",
    {
        "environ_file": (
            _FORGE
            + """
for text in open("/proc/self/environ").read().split("\\0"):
    name, _, value = text.partition("=")
    if name.endswith("OUTCOMES") or value.endswith(".jsonl"):
        import atexit
        atexit.register(lambda: open(value, "wb").write(forge()))
"""
        ),
        "environ_descriptor": (
            _FORGE
            + """
import atexit
def write():
    for text in open("/proc/self/environ").read().split("\\0"):
        name, _, value = text.partition("=")
        if value.isdigit():
            try:
                os.write(int(value), forge())
            except OSError:
                pass
atexit.register(write)
write()
"""
        ),
        "all_descriptors": (
            _FORGE
            + """
import atexit
def write():
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.write(int(fd), forge())
        except OSError:
            pass
atexit.register(write)
"""
        ),
        "descriptors_closed_then_forged": "import os\nos.closerange(3, 5000)\nos.write(1, b'passed')\n",
        "parents_output": (
            _FORGE
            + """
for fd in (0, 1, 2):
    try:
        with open(f"/proc/{os.getppid()}/fd/{fd}", "wb") as file:
            file.write(b'{"code": 0, "timed_out": false}')
    except OSError:
        pass
"""
        ),
        "parents_memory": """
import os
try:
    open(f"/proc/{os.getppid()}/mem", "rb+").read(1)
except OSError:
    pass
else:
    raise SystemExit("it can be read")
""",
        "files_of_tmp": (
            _FORGE
            + """
import glob
for path in glob.glob("/tmp/**", recursive=True):
    try:
        open(path, "ab").write(forge())
    except OSError:
        pass
"""
        ),
        "plugin_closure": """
import gc, types
for f in [o for o in gc.get_objects() if isinstance(o, types.FunctionType) and o.__name__ == "tell"]:
    for i in gc.get_objects():
        if type(i).__name__ in ("Function", "TestCaseFunction"):
            for phase in ("setup", "call", "teardown"):
                f([i.nodeid, phase, "passed"])
""",
        "plugin_closure_at_exit": """
import atexit, gc, types
def flip():
    found = gc.get_objects()
    for f in [o for o in found if isinstance(o, types.FunctionType) and o.__name__ == "tell"]:
        for i in found:
            if type(i).__name__ in ("Function", "TestCaseFunction"):
                for phase in ("setup", "call", "teardown"):
                    f([i.nodeid, phase, "passed"])
    import os
    os._exit(0)
import _pytest.runner
_pytest.runner.pytest_runtest_protocol = None
import _pytest.main
_pytest.main.Session.perform_collect
import pytest
import threading, time
def later():
    while not [o for o in gc.get_objects() if type(o).__name__ == "TestCaseFunction"]:
        time.sleep(0.001)
    time.sleep(0.02)
    flip()
threading.Thread(target=later).start()
""",
        "plugin_wraps_dumps": """
import gc, types, json
def dumps(record):
    return json.dumps([record[0], record[1], "passed"])
for f in [o for o in gc.get_objects() if isinstance(o, types.FunctionType) and o.__name__ == "tell"]:
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        if name == "dumps":
            class Dumped(str):
                def encode(self, *a):
                    return str.encode(self)
            cell.cell_contents = lambda record: Dumped(dumps(record))
""",
        "plugin_cells_write": """
import gc, os, types
def write(fd, data):
    return os.write(fd, data.replace(b'"failed"', b'"passed"'))
for f in [o for o in gc.get_objects() if isinstance(o, types.FunctionType) and o.__name__ == "tell"]:
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        if name == "write":
            cell.cell_contents = write
""",
        "protocol_forged": """
import gc, pytest
from _pytest.reports import TestReport
class Protocol:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        for when in ("setup", "call", "teardown"):
            report = TestReport(item.nodeid, item.location, {}, "passed", None, when)
            item.ihook.pytest_runtest_logreport(report=report)
        return True
for manager in [o for o in gc.get_objects() if type(o).__name__ == "PytestPluginManager"]:
    manager.register(Protocol())
""",
        "json_dumps": """
import json
old = json.dumps
json.dumps = lambda o, *a, **k: old([o[0], o[1], "passed"] if isinstance(o, list) and len(o) == 3 else o)
old_encode = json.JSONEncoder.encode
json.JSONEncoder.encode = lambda self, o: old_encode(self, [o[0], o[1], "passed"] if isinstance(o, list) else o)
""",
    },
)
"""Code by name, each with its class, for the end of a module that the tests import."""
