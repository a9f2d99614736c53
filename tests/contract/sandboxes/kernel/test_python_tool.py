"""The python tool's results on real sandboxes, as a model sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from farm.errors import ToolError
from tests.contract.sandboxes.kernel.kernels import png, showing
from workers.plugins.interfaces import Observation, Sandbox
from workers.tools.python import PythonArguments, PythonTool

Run: TypeAlias = Callable[[Any], Any]
Call: TypeAlias = Callable[..., Observation]


@pytest.fixture
def call(sandbox: Sandbox, run: Run) -> Iterator[Call]:
    tool = PythonTool(sandbox)
    yield lambda code="", timeout_s=20.0, **more: run(tool.call(PythonArguments(code=code, **more), timeout_s))
    run(tool.close())
    run(tool.close())


def test_output_and_value_are_returned(call: Call) -> None:
    assert call("x = 20\nx + 1") == Observation("Out[1]: 21")
    assert call("print('a'); x") == Observation("a\nOut[2]: 20")
    assert call("x = 1") == Observation("")


def test_error_is_a_traceback(call: Call) -> None:
    result = call("1 / 0").text
    assert "ZeroDivisionError: division by zero" in result
    assert "----> 1 1 / 0" in result
    assert "\x1b" not in result


def test_timeout_returns_the_output_so_far(call: Call) -> None:
    result = call("import time; x = 5; print('part'); time.sleep(9)", 0.5).text
    assert result.startswith("part\n")
    assert result.endswith("[stopped: it did not finish within 0.5 seconds; this is what it had printed]")
    assert call("print(x)").text == "5"


def test_lost_state_is_reported(call: Call) -> None:
    lost = "[the interpreter had to be restarted; all variables and imports are lost]"
    assert call("import os; print('part'); os._exit(0)").text == f"part\n{lost}"
    result = call("import signal; signal.signal(2, signal.SIG_IGN); print('part')\nwhile True: pass", 0.3).text
    assert result.startswith("part\n[stopped: ")
    assert result.endswith(lost)
    assert call("print(1)").text == "1"


def test_restart_clears_the_state(call: Call) -> None:
    call("x = 5")
    assert call("'x' in globals()", restart=True).text == "Out[1]: False\n[the interpreter was restarted]"
    assert call(restart=True).text == "[the interpreter was restarted]"


def test_empty_code_is_refused(call: Call) -> None:
    for code in ("", " \n"):
        with pytest.raises(ToolError, match="`code` is empty"):
            call(code)


def test_images_are_returned_as_artefacts(call: Call) -> None:
    shown = call(showing(png(640, 480)))
    assert shown.text.endswith("Image object>\n[image/png, 640x480, kept as image-1.png]")
    assert [(artefact.name, artefact.data) for artefact in shown.artefacts] == [("image-1.png", png(640, 480))]
    drawn = call("from IPython.display import SVG\nSVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')")
    assert drawn.text.endswith("\n[image/svg+xml, kept as image-2.svg]")


def test_memory_limit_of_the_sandbox_is_reported(start: Callable[..., Sandbox], run: Run) -> None:
    tool = PythonTool(start(limits={"memory_mb": 300}))
    hog = 'import subprocess\n!python3 -c "x = [bytes(2_000_000) for _ in range(10**6)]"'
    assert "memory" in run(tool.call(PythonArguments(code=hog), 60)).text.lower()
    run(tool.close())


def test_progress_bar_is_reduced_to_its_last_frame(call: Call) -> None:
    bars = "for n in range(5000): print(f'\\r{n}/5000', end='')\nprint('\\x1b[1A\\r\\x1b[K\\x1b[31mend\\x1b[0m')"
    shown = call(bars)
    assert shown.text == "end"
    (kept,) = shown.artefacts
    assert kept.name == "python.txt"
    assert kept.data.startswith(b"\r0/5000\r1/5000\r2/5000")
    long = call("for n in range(60_000): print(f'\\r{n:9}', end='')\nprint()")
    assert long.text.strip() == "59999"
    assert len(long.artefacts[0].data) == 600_001


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("breakpoint()", "a debugger, such as that of `breakpoint()`: there is no input here"),
        ("import pdb; pdb.set_trace()", "a debugger, such as that of `breakpoint()`: there is no input here"),
        ("input('name? ')", "code that asks for input: there is none here"),
        ("import sys; sys.exit(3)", "`sys.exit()` or the like: the session stays"),
        ("raise SystemExit", "`sys.exit()` or the like: the session stays"),
    ],
)
def test_cell_that_ends_early_names_the_reason(call: Call, code: str, reason: str) -> None:
    *_, last = call(f"print('before')\n{code}\nprint('after')").text.split("\n")
    assert last == f"[the cell ended early, by {reason}, and the code after it was not run]"


def test_cell_that_runs_to_its_end_has_no_note(call: Call) -> None:
    for code in ("exit()", "quit", "import sys; sys.stdin.read()", "try: input()\nexcept EOFError: pass"):
        assert call(f"{code}\nprint('after')").text.endswith("after")
    assert "EOFError: mine" in call("raise EOFError('mine')").text.split("\n")[-1]
