"""Requirements of a persistent interpreter in a sandbox, for each back end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import pytest

from farm.errors import SandboxError
from farm.records.request import SandboxSpec
from tests.conftest import absent
from tests.contract.sandboxes.kernel.kernels import (
    BACK_ENDS,
    OF_A_START,
    cancelled_after,
    own_value,
    png,
    showing,
    together,
)
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS
from tests.services.environments import lend_environment
from tests.services.farms import until
from tests.services.soak import at_length
from workers.plugins.interfaces import CellResult, Kernel, Sandbox, SandboxProvider

Run: TypeAlias = Callable[[Any], Any]
Open: TypeAlias = Callable[[], Kernel]

PAST_LIMIT_S = 6.0
"""Time that ending a cell may take beyond its limit, on a busy machine."""

SHORT = [("namespace", "ipython"), ("singularity", "jupyter")]
"""Each kind of sandbox and each back end once: the other combinations are covered by the promises."""
TRIED = at_length(SHORT, [(kind, back_end) for kind in PROVIDERS for back_end in BACK_ENDS])
pytestmark = [
    pytest.mark.soak,
    pytest.mark.parametrize(("provider", "back_end"), TRIED, indirect=True, scope="module"),
]


@pytest.fixture(scope="module")
def back_end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def place(provider: SandboxProvider, run: Run, back_end: str) -> Iterator[Sandbox]:
    """Yield a sandbox with the packages of the back end."""
    try:
        if BACK_ENDS[back_end][1]:
            lend_environment(BACK_ENDS[back_end][1], imported=OF_A_START)
        sandbox = run(provider.start(f"kernel-{uuid4().hex[:12]}", SandboxSpec(packages=BACK_ENDS[back_end][1])))
    except SandboxError as error:
        absent(f"no sandbox with {back_end}, whose packages come from the package index: {error}")
    yield sandbox
    run(sandbox.stop())


@pytest.fixture
def fresh(place: Sandbox, run: Run, back_end: str) -> Iterator[Open]:
    """Yield a function that opens kernels, which end with the test."""
    opened: list[Kernel] = []

    def open_one() -> Kernel:
        opened.append(run(place.open_kernel(BACK_ENDS[back_end][0])))
        return opened[-1]

    yield open_one
    for kernel in opened:
        run(kernel.close())


@pytest.fixture(scope="module")
def kernel(place: Sandbox, run: Run, back_end: str) -> Iterator[Kernel]:
    """Yield a kernel that the tests of a module share: whatever one does, it works for the next."""
    opened = run(place.open_kernel(BACK_ENDS[back_end][0]))
    yield opened
    run(opened.close())


def works(kernel: Kernel, run: Run) -> bool:
    return bool(run(kernel.run("print(6 * 7)", 30)) == CellResult("42\n"))


def test_value_and_output_are_returned(fresh: Open, run: Run) -> None:
    kernel = fresh()
    assert run(kernel.run("print('a')\n6 * 7", 10)) == CellResult("a\nOut[1]: 42\n")
    assert run(kernel.run("", 10)) == CellResult("")
    assert run(kernel.run("'ä\\n€'", 10)).output == "Out[2]: 'ä\\n€'\n"


def test_multiline_value_starts_on_its_own_line(kernel: Kernel, run: Run) -> None:
    output = run(kernel.run("class T:\n def __repr__(self): return 'a\\nb'\nT()", 10)).output
    assert output.partition(": ")[2] == "\na\nb\n"


def test_state_is_kept(kernel: Kernel, run: Run) -> None:
    run(kernel.run("import math\ndef f(x): return math.floor(x)\ny = 2.5", 10))
    assert run(kernel.run("f(y)", 10)).output.endswith(": 2\n")


def test_errors_are_named_and_keep_the_kernel(kernel: Kernel, run: Run) -> None:
    for code, error in (("1/0", "ZeroDivisionError"), ("def", "SyntaxError"), ("raise SystemExit(3)", "SystemExit")):
        result = run(kernel.run(code, 10))
        assert (result.error, result.restarted) == (error, False)
        assert error in result.output
    assert works(kernel, run)


def test_code_with_a_lone_surrogate_is_run(kernel: Kernel, run: Run) -> None:
    assert run(kernel.run("x = '\ud800'; len(x)", 10)).output.endswith(": 1\n")


def test_output_is_returned_as_written(kernel: Kernel, run: Run) -> None:
    code = r"print('\x1b[1;31mred\x1b[0m 1%\r2%\x1b[K')"
    assert run(kernel.run(code, 10)).output == "\x1b[1;31mred\x1b[0m 1%\r2%\x1b[K\n"


def test_output_of_child_processes_is_returned(kernel: Kernel, run: Run) -> None:
    code = "import subprocess, sys; _ = subprocess.run('echo child; echo error >&2', shell=True)\n!echo shell"
    assert sorted(run(kernel.run(code, 10)).output.split()) == ["child", "error", "shell"]
    assert "workspace" in run(kernel.run("!pwd", 10)).output


def test_long_output_is_cut_in_the_middle(kernel: Kernel, run: Run) -> None:
    result = run(kernel.run("print('a' * 10_000_000); print('END')", 20))
    assert result.output.startswith("aaa")
    assert result.output.endswith("END\n")
    assert f"{result.n_dropped} bytes left out" in result.output
    assert result.n_dropped > 9_000_000
    assert len(result.output) < 300_000


def test_endless_output_takes_no_memory(kernel: Kernel, run: Run) -> None:
    before = _resident_mb()
    # on a busy machine it prints little in a time that is enough on others
    for timeout_s in (0.5, 5, 60):
        code = "import itertools\nfor n in itertools.count(): print(n, 'x' * 1000)"
        result = run(kernel.run(code, timeout_s))
        assert result.timed_out
        assert result.output.startswith(f"0 {'x' * 1000}\n1 xxx")
        if result.n_dropped > 100_000:
            break
    assert result.n_dropped > 100_000
    assert _resident_mb() - before < 50
    assert run(kernel.run("print(6 * 7)", 30)).output.endswith("42\n")


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def test_late_background_output_comes_with_a_later_cell(kernel: Kernel, run: Run) -> None:
    command = "until [ -e go ]; do sleep 0.05; done; rm go; echo late"
    assert run(kernel.run(f"import subprocess; p = subprocess.Popen({command!r}, shell=True)", 10)).output == ""
    output = run(kernel.run("open('go', 'w').close(); _ = p.wait()", 10)).output
    # a Jupyter kernel reads it from a pipe, perhaps after the cell that waited
    assert (output or until(lambda: run(kernel.run("pass", 10)).output, "it is read")) == "late\n"


def test_time_limit_keeps_state(kernel: Kernel, run: Run) -> None:
    run(kernel.run("x = 5", 10))
    for endless in (
        "import time; print('part', flush=True); time.sleep(100)",
        "print('part')\nwhile True: pass",
        "print('part')\nimport os; os.system('sleep 100')",
        "print('part')\nimport re; re.match('(a+)+$', 'a' * 40 + 'b')",
    ):
        begun = time.monotonic()
        result = run(kernel.run(endless, 0.5))
        assert time.monotonic() - begun < PAST_LIMIT_S
        assert (result.timed_out, result.restarted) == (True, False)
        assert result.output.startswith("part")
    assert "5" in run(kernel.run("x", 10)).output


@pytest.mark.parametrize(
    "endless",
    [
        "import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass",
        "import time\nwhile True:\n  try: time.sleep(9)\n  except BaseException: pass",
        "sum(range(10**12))",
    ],
    ids=["ignores signals", "swallows exceptions", "holds the GIL"],
)
def test_time_limit_restarts_a_kernel_that_cannot_be_interrupted(endless: str, kernel: Kernel, run: Run) -> None:
    run(kernel.run("x = 5", 10))
    # a Jupyter kernel needs a moment to send it
    result = run(kernel.run(f"import time; print('part', flush=True); time.sleep(0.5)\n{endless}", 1.5))
    assert (result.timed_out, result.restarted) == (True, True)
    assert result.output.startswith("part\n")
    assert run(kernel.run("x", 10)).error == "NameError"


@pytest.mark.parametrize(
    "deadly",
    [
        "import os; os._exit(3)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getppid(), 9); import time; time.sleep(20)",
        "import ctypes; ctypes.string_at(0)",
    ],
    ids=["exits", "kills itself", "kills its parent", "crashes"],
)
def test_dead_kernel_is_reported_and_restarted(deadly: str, kernel: Kernel, run: Run) -> None:
    result = run(kernel.run(f"import time; print('part', flush=True); time.sleep(0.5)\n{deadly}", 15))
    assert (result.error, result.restarted, result.timed_out) == ("Died", True, False)
    assert result.output.startswith("part\n")
    assert works(kernel, run)


def test_kernel_works_after_killing_all_processes(kernel: Kernel, run: Run) -> None:
    assert not run(kernel.run("import os; os.kill(-1, 9)", 10)).timed_out
    assert works(kernel, run)


def test_input_is_refused(kernel: Kernel, run: Run) -> None:
    assert run(kernel.run("input()", 5)).error in ("EOFError", "StdinNotImplementedError")


def test_garbage_on_its_descriptors_is_ignored(kernel: Kernel, run: Run) -> None:
    code = "import os\nfor n in range(3, 300):\n    try: os.write(n, b'\\xff' * 64)\n    except OSError: pass"
    run(kernel.run(code, 2))
    run(kernel.run("", 10))
    assert works(kernel, run)


def test_kernel_works_after_closing_its_descriptors(kernel: Kernel, run: Run) -> None:
    run(kernel.run("import os; os.closerange(0, 300)", 2))
    run(kernel.run("", 10))
    assert works(kernel, run)


def test_closed_standard_output_is_restored_by_a_restart(kernel: Kernel, run: Run) -> None:
    run(kernel.run("import sys; sys.stdout.close(); sys.stderr.close()", 10))
    run(kernel.restart())
    assert works(kernel, run)


def test_farm_packages_cannot_be_imported(kernel: Kernel, run: Run) -> None:
    for name in ("farm", "workers", "pydantic"):
        assert run(kernel.run(f"import {name}", 10)).error == "ModuleNotFoundError"


def test_own_modules_can_be_imported(kernel: Kernel, place: Sandbox, run: Run) -> None:
    run(place.write_file("/workspace/own_module.py", b"x = 7"))
    assert run(kernel.run("import own_module; print(own_module.x)", 10)).output == "7\n"


def test_images_are_returned(fresh: Open, run: Run) -> None:
    kernel = fresh()
    picture = png(3, 2)
    result = run(kernel.run(showing(picture, times=2), 20))
    assert [(image.name, image.media_type, image.data) for image in result.images] == [
        ("image-1.png", "image/png", picture),
        ("image-2.png", "image/png", picture),
    ]
    assert result.output.count("IPython.core.display.Image object") == 2
    value = run(kernel.run("Image(base64.b64decode(base64.b64encode(_i.encode())), format='jpeg')", 10))
    assert [image.name for image in value.images] == ["image-3.jpg"]
    drawn = run(kernel.run("from IPython.display import SVG\nSVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')", 10))
    assert [(image.name, image.media_type) for image in drawn.images] == [("image-4.svg", "image/svg+xml")]
    assert run(kernel.run("1", 10)).images == ()


def test_other_rich_results_are_returned_as_text(kernel: Kernel, run: Run) -> None:
    result = run(kernel.run("from IPython.display import HTML, Markdown, display; display(HTML('<b>x</b>'))", 10))
    assert result == CellResult("<IPython.core.display.HTML object>\n")


def test_images_are_bounded(kernel: Kernel, run: Run) -> None:
    many = run(kernel.run(showing(png(1, 1), times=20), 20))
    assert len(many.images) == 16
    assert many.output.count("not kept, a cell may show 16 images") == 4
    large = run(kernel.run(showing(png(1, 1, 3 << 20), times=4), 20))
    assert len(large.images) == 2
    assert large.output.count("not kept, the images of a cell may have 8 MB together") == 2
    wrong = run(kernel.run("display({'image/png': 'x', 'text/plain': 'text'}, raw=True)", 10))
    assert wrong.output == "text\n[image/png: not kept, it is not valid]\n"
    assert works(kernel, run)


def test_restart_clears_the_state(kernel: Kernel, run: Run) -> None:
    run(kernel.run("x = 5", 10))
    run(kernel.restart())
    result = run(kernel.run("x", 10))
    assert (result.error, result.restarted) == ("NameError", False)
    run(kernel.restart())
    run(kernel.restart())
    assert works(kernel, run)


def test_cancelled_cell_is_ended(kernel: Kernel, run: Run, place: Sandbox) -> None:
    run(cancelled_after(kernel.run("import subprocess; subprocess.run(['sleep', '4747'])", 60), 1.0))
    result = run(kernel.run("print(1)", 10))
    assert (result.output, result.restarted) == ("1\n", True)
    assert not _runs(place, run, "sleep\x004747")
    assert works(kernel, run)


@pytest.mark.parametrize(
    "start",
    [
        "import subprocess; p = [subprocess.Popen(['sleep', '4848'], start_new_session=True) for _ in range(100)]",
        "import os\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: os.execvp('sleep', ['sleep', '4848'])",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(4848)",
    ],
    ids=["leaders of sessions", "a daemon", "forked only"],
)
def test_close_ends_processes_of_cells(start: str, place: Sandbox, fresh: Open, run: Run) -> None:
    before = _processes(place, run)
    kernel = fresh()
    assert run(kernel.run(start, 20)).timed_out is False
    run(kernel.close())
    run(kernel.close())
    assert not _runs(place, run, "sleep\x004848")
    # a killed process is counted until the first process of the sandbox has reaped it
    until(lambda: _processes(place, run) <= before, "the processes of the cell are gone")


def _runs(place: Sandbox, run: Run, command: str) -> bool:
    lines = run(place.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline"], timeout_s=5)).stdout
    return command.encode() in lines


def _processes(place: Sandbox, run: Run) -> int:
    return int(run(place.exec(["bash", "-c", "set -- /proc/[0-9]*; echo $#"], timeout_s=5)).stdout)


def test_many_kernels_run_at_once(place: Sandbox, run: Run, back_end: str) -> None:
    n_kernels = {"ipython": 20, "jupyter": 4}[back_end]
    kernels = run(together(*(place.open_kernel(BACK_ENDS[back_end][0]) for _ in range(n_kernels))))
    try:
        results = run(together(*(own_value(kernel, number) for number, kernel in enumerate(kernels))))
        assert [result.output for result in results] == [f"{number}\n" for number in range(n_kernels)]
    finally:
        run(together(*(kernel.close() for kernel in kernels)))


def test_random_state_is_not_shared(fresh: Open, run: Run) -> None:
    code = "import random, secrets, tempfile, uuid\nprint(random.random(), uuid.uuid4(), secrets.token_hex(), "
    first, second = (run(fresh().run(f"{code} tempfile.mktemp())", 20)).output.split() for _ in range(2))
    assert len(set(first) | set(second)) == 8


def test_kernel_of_an_ended_sandbox_is_an_error(provider: SandboxProvider, run: Run, back_end: str) -> None:
    name, packages = BACK_ENDS[back_end]
    sandbox = run(provider.start(f"gone-{uuid4().hex[:12]}", SandboxSpec(packages=packages)))
    kernel = run(sandbox.open_kernel(name))
    run(sandbox.stop())
    for use in (lambda: kernel.run("1", 10), lambda: sandbox.open_kernel(name), kernel.restart):
        with pytest.raises(SandboxError, match=sandbox.sandbox_id):
            run(use())
    run(kernel.close())
