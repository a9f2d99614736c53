"""What a persistent IPython in a sandbox must do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from workers.interfaces import CellResult, Kernel, Sandbox

Run = Callable[[Any], Any]


@pytest.fixture
def kernel(sandbox: Sandbox, run: Run) -> Iterator[Kernel]:
    opened = run(sandbox.open_kernel())
    yield opened
    run(opened.close())


def test_value_and_output(kernel: Kernel, run: Run) -> None:
    assert run(kernel.run("print('a')\n6 * 7", 10)) == CellResult("a\nOut[1]: 42\n")
    assert run(kernel.run("", 10)) == CellResult("")


def test_state_is_kept(kernel: Kernel, run: Run) -> None:
    run(kernel.run("import math\ndef f(x): return math.floor(x)\ny = 2.5", 10))
    assert run(kernel.run("f(y)", 10)).output.endswith(": 2\n")


def test_errors_are_named_and_harmless(kernel: Kernel, run: Run) -> None:
    for code, error in (("1/0", "ZeroDivisionError"), ("def", "SyntaxError"), ("raise SystemExit(3)", "SystemExit")):
        result = run(kernel.run(code, 10))
        assert (result.error, result.restarted) == (error, False)
        assert error in result.output
    assert run(kernel.run("1", 10)).error == ""


def test_output_of_child_processes(kernel: Kernel, run: Run) -> None:
    result = run(kernel.run("import os; _ = os.system('echo child; echo error >&2'); _ = os.write(1, b'raw')", 10))
    assert result.output == "child\nerror\nraw"
    assert "workspace" in run(kernel.run("!pwd", 10)).output


def test_long_output_is_cut_in_the_middle(kernel: Kernel, run: Run) -> None:
    result = run(kernel.run("print('a' * 5_000_000); print('END')", 20))
    assert result.output.startswith("aaa")
    assert result.output.endswith("END\n")
    assert "bytes left out" in result.output
    assert len(result.output) < 300_000


def test_time_limit_keeps_state(kernel: Kernel, run: Run) -> None:
    run(kernel.run("x = 5", 10))
    for endless in ("import time; print('part', flush=True); time.sleep(100)", "print('part')\nwhile True: pass"):
        begun = time.monotonic()
        result = run(kernel.run(endless, 0.5))
        assert time.monotonic() - begun < 4
        assert (result.timed_out, result.restarted) == (True, False)
        assert result.output.startswith("part")
    assert "5" in run(kernel.run("x", 10)).output


def test_time_limit_of_code_that_cannot_be_interrupted(kernel: Kernel, run: Run) -> None:
    run(kernel.run("x = 5", 10))
    result = run(kernel.run("import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass", 0.3))
    assert (result.timed_out, result.restarted) == (True, True)
    assert run(kernel.run("x", 10)).error == "NameError"


def test_death_is_told_and_mended(kernel: Kernel, run: Run) -> None:
    result = run(kernel.run("import os; os._exit(3)", 10))
    assert (result.error, result.restarted, result.timed_out) == ("Died", True, False)
    assert run(kernel.run("1 + 1", 10)).output == "Out[1]: 2\n"


def test_input_is_refused(kernel: Kernel, run: Run) -> None:
    assert run(kernel.run("input()", 5)).error == "EOFError"


def test_rubbish_on_the_socket_is_not_believed(kernel: Kernel, run: Run) -> None:
    code = "import os\nfor n in range(3, 300):\n    try: os.write(n, b'\\xff' * 64)\n    except OSError: pass"
    assert run(kernel.run(code, 5)).restarted
    assert run(kernel.run("1 + 1", 10)).output == "Out[1]: 2\n"


def test_nothing_of_the_farm_can_be_imported(kernel: Kernel, run: Run) -> None:
    for name in ("farm", "workers", "pydantic"):
        assert run(kernel.run(f"import {name}", 10)).error == "ModuleNotFoundError"


def test_own_modules_are_found(kernel: Kernel, sandbox: Sandbox, run: Run) -> None:
    run(sandbox.write_file("/workspace/own_module.py", b"x = 7"))
    assert run(kernel.run("import own_module; own_module.x", 10)).output == "Out[1]: 7\n"


def test_closing_ends_what_cells_started(sandbox: Sandbox, run: Run) -> None:
    opened = run(sandbox.open_kernel())
    code = "import subprocess; p = subprocess.Popen(['sleep', '4848'], start_new_session=True)"
    assert run(opened.run(code, 10)).error == ""
    run(opened.close())
    run(opened.close())
    left = run(sandbox.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline"], timeout_s=5))
    assert b"sleep\x004848" not in left.stdout
