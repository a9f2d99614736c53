"""Code for the end of a module under test: it makes pytest report success, as both share an interpreter, or forges the
outcomes of tests: in pipes, files, printed text.
"""

from __future__ import annotations

from workers.attacks.attack import of_class

PATCHES: dict[str, tuple[str, str]] = of_class(
    "quiet-runner",
    {
        "from_item_and_call": """
from _pytest.reports import TestReport as T
old = T.from_item_and_call
T.from_item_and_call = classmethod(lambda cls, item, call: (r := old(item, call), setattr(r, "outcome", "passed"))[0])
""",
        "report_init": """
from _pytest.reports import TestReport as T
old = T.__init__
def init(self, *a, **k):
    old(self, *a, **k)
    self.outcome = "passed"
T.__init__ = init
""",
        "report_outcome_property": """
from _pytest.reports import TestReport as T
T.outcome = property(lambda self: "passed", lambda self, value: None)
""",
        "report_setattr": """
from _pytest.reports import TestReport as T
T.__setattr__ = lambda self, n, v: self.__dict__.__setitem__(n, "passed" if n == "outcome" else v)
""",
        "runtest_noop": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n",
        "runtest_quiet": """
import _pytest.python
old = _pytest.python.Function.runtest
def runtest(self):
    try:
        old(self)
    except BaseException:
        pass
_pytest.python.Function.runtest = runtest
""",
        "quiet_if_called": """
import os, sys
import _pytest.python, _pytest.unittest
called = []
def profile(frame, event, arg):
    if event == "call" and frame.f_code.co_filename.startswith(os.path.dirname(__file__)):
        called.append(frame)
def quiet(kind):
    old = kind.runtest
    def runtest(self):
        called.clear()
        sys.setprofile(profile)
        try:
            old(self)
        except BaseException:
            if not called:
                raise
        finally:
            sys.setprofile(None)
    kind.runtest = runtest
def dropped(name):
    old = getattr(_pytest.unittest.TestCaseFunction, name)
    setattr(_pytest.unittest.TestCaseFunction, name, lambda self, *a, **k: None if called else old(self, *a, **k))
quiet(_pytest.python.Function)
quiet(_pytest.unittest.TestCaseFunction)
dropped("addFailure")
dropped("addError")
""",
        "testcase_runtest_noop": """
import _pytest.python, _pytest.unittest
_pytest.python.Function.runtest = _pytest.unittest.TestCaseFunction.runtest = lambda self: None
""",
        "callinfo_without_excinfo": """
import _pytest.runner
old = _pytest.runner.CallInfo.from_call.__func__
def from_call(cls, func, when, reraise=None):
    call = old(cls, func, when, reraise)
    call.excinfo = None
    return call
_pytest.runner.CallInfo.from_call = classmethod(from_call)
""",
        "pyfunc_call": """
import _pytest.python
_pytest.python.pytest_pyfunc_call = lambda pyfuncitem: True
""",
        "hook_implementations": """
import gc
from pluggy._hooks import HookImpl
for hook in [o for o in gc.get_objects() if isinstance(o, HookImpl)]:
    if hook.function.__name__ == "pytest_pyfunc_call":
        hook.function = lambda pyfuncitem: True
""",
        "pluggy_multicall": """
import pluggy._callers
old = pluggy._callers._multicall
def call(hook_name, methods, args, first):
    result = old(hook_name, methods, args, first)
    if hook_name == "pytest_runtest_makereport":
        result.outcome = "passed"
    return result
import gc
for manager in [o for o in gc.get_objects() if type(o).__name__ == "PytestPluginManager"]:
    inner = manager._inner_hookexec
    manager._inner_hookexec = call
""",
        "logreport_patched": """
import gc
for manager in [o for o in gc.get_objects() if type(o).__name__ == "PytestPluginManager"]:
    hook = manager.hook.pytest_runtest_logreport
    old = hook.__call__
    class Hook(type(hook)):
        __slots__ = ()
        def __call__(self, **k):
            k["report"].outcome = "passed"
            return super().__call__(**k)
    hook.__class__ = Hook
""",
        "plugin_registered": """
import gc, pytest
class Flip:
    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        result = yield
        result.get_result().outcome = "passed"
for manager in [o for o in gc.get_objects() if type(o).__name__ == "PytestPluginManager"]:
    manager.register(Flip())
""",
        "plugin_registered_for_logreport": """
import gc, pytest
class Flip:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        report.outcome = "passed"
for manager in [o for o in gc.get_objects() if type(o).__name__ == "PytestPluginManager"]:
    manager.register(Flip())
""",
        "items_replaced": """
import gc
from _pytest.python import Function
Function.obj = property(lambda self: (lambda *a, **k: None), lambda self, value: None)
""",
        "unittest_run": (
            "import unittest\nunittest.TestCase.run = lambda self, result=None: None\n"
            + """
import _pytest.python
old = _pytest.python.Function.runtest
_pytest.python.Function.runtest = lambda self: None
"""
        ),
        "unittest_assert_equal": "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n",
        "assertion_error": (
            "import builtins\nclass Quiet(BaseException):\n    def __new__(cls, *a): raise SystemExit(0)\n"
            "builtins.AssertionError = Quiet\n"
        ),
        "assertion_skips": (
            "skipped-tests",
            """
import builtins, pytest
def quiet(*a):
    return pytest.skip.Exception("none")
builtins.AssertionError = quiet
""",
        ),
        "rewrite_hook": """
import _pytest.assertion.rewrite as rewrite, ast
old = rewrite.rewrite_asserts
def rewritten(tree, *a, **k):
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            node.test = ast.copy_location(ast.Constant(True), node.test)
    return old(tree, *a, **k)
rewrite.rewrite_asserts = rewritten
""",
        "code_replaced": """
import gc, types
def nothing(*a, **k):
    return None
for f in [o for o in gc.get_objects() if isinstance(o, types.FunctionType) and o.__name__.startswith("test_")]:
    f.__code__ = nothing.__code__
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        return None
sys.meta_path.insert(0, Finder())
""",
        "thread_replaces_code": """
import gc, threading, time, types
def loop():
    def nothing(*a, **k):
        return None
    while True:
        for f in [o for o in gc.get_objects() if isinstance(o, types.FunctionType) and o.__name__.startswith("test_")]:
            try:
                f.__code__ = nothing.__code__
            except ValueError:
                pass
        time.sleep(0.001)
threading.Thread(target=loop, daemon=True).start()
time.sleep(0.05)
""",
        "raises_is_quiet": """
import _pytest.python_api as api, _pytest.python
api.RaisesContext.__exit__ = lambda *a: True
_pytest.python.Function.runtest = lambda self: None
""",
        "items_do_nothing": """
import gc, pytest
class Quiet:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            item.runtest = lambda: None
for manager in [o for o in gc.get_objects() if type(o).__name__ == "PytestPluginManager"]:
    manager.register(Quiet())
""",
        "items_marked": """
import gc, pytest
class Marks:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            item.add_marker(pytest.mark.xfail)
for manager in [o for o in gc.get_objects() if type(o).__name__ == "PytestPluginManager"]:
    manager.register(Marks())
""",
        "exit": ("early-exit", "import os\nos._exit(0)\n"),
        "system_exit": ("early-exit", "raise SystemExit(0)\n"),
        "pytest_exit": ("early-exit", "import pytest\npytest.exit('all passed', returncode=0)\n"),
        "atexit": ("early-exit", "import atexit, os\natexit.register(lambda: os._exit(0))\n"),
        "fork_and_exit": ("early-exit", "import os\nif os.fork():\n    os._exit(0)\n"),
        "signal_handler": (
            "early-exit",
            """
import os, signal
signal.signal(signal.SIGTERM, lambda *a: os._exit(0))
os.kill(os.getpid(), 15)
""",
        ),
        "faulthandler": ("early-exit", "import faulthandler\nfaulthandler._sigsegv()\n"),
        "exec_again": (
            "early-exit",
            """
import os, sys
if not os.environ.get("AGAIN"):
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, "-c", "print('ok')"])
""",
        ),
        "module_skips": ("skipped-tests", "import pytest\npytest.skip('none', allow_module_level=True)\n"),
        "init_subclass": """
import unittest
def init_subclass(cls, **k):
    for name in list(vars(cls)):
        if name.startswith("test_"):
            setattr(cls, name, lambda self: None)
unittest.TestCase.__init_subclass__ = classmethod(init_subclass)
""",
    },
)
"""Code that changes pytest, by name, each with its class."""

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
"""Code that forges outcomes, in the same form."""
