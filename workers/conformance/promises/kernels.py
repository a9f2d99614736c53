"""Promises about the persistent Python, on which an agent's python tool relies."""

from __future__ import annotations

import asyncio
import base64

from farm.errors import SandboxError
from workers.conformance.trial import PromiseTrial, promise, raises, same, until

_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@promise(surface=True)
async def a_kernel_keeps_its_state(trial: PromiseTrial) -> None:
    """Variables, functions and imports of a kernel persist between cells."""
    kernel = await trial.kernel()
    same((await kernel.run("import math\ndef f(x): return math.floor(x)\ny = 2.5", 30)).output, "", "the output")
    assert (await kernel.run("f(y)", 20)).output.rstrip().endswith("2"), "the function is not there any more"


@promise(surface=True)
async def cell_returns_output_and_value(trial: PromiseTrial) -> None:
    """A cell returns its output and the value of its last expression, and nothing if there is neither."""
    kernel = await trial.kernel()
    output = (await kernel.run("print('printed')\n6 * 7", 20)).output
    same((output[:8], output.rstrip()[-2:]), ("printed\n", "42"), "the beginning and the end of the output")
    same((await kernel.run("", 20)).output, "", "the output of an empty cell")


@promise(surface=True)
async def cell_errors_are_named(trial: PromiseTrial) -> None:
    """An exception is named and reported, and does not harm the kernel."""
    kernel = await trial.kernel()
    await kernel.run("x = 5", 20)
    for code, error in (("1/0", "ZeroDivisionError"), ("def", "SyntaxError"), ("raise SystemExit(3)", "SystemExit")):
        result = await kernel.run(code, 20)
        same((result.error, result.restarted), (error, False), f"error and restart after `{code}`")
        assert error in result.output, f"the output does not tell of {error}: {result.output!r}"
    assert "5" in (await kernel.run("x", 20)).output, "the state is lost"


@promise(surface=True)
async def cell_shows_output_of_programs(trial: PromiseTrial) -> None:
    """The output of a program that a cell starts is part of the cell's output."""
    kernel = await trial.kernel()
    output = (await kernel.run("import os; _ = os.system('echo child; echo error >&2')", 20)).output
    same(output, "child\nerror\n", "the output")


@promise(surface=True)
async def long_output_of_a_cell_is_cut_in_the_middle(trial: PromiseTrial) -> None:
    """Beyond a maximum the middle of a cell's output is left out and counted; its beginning and end are kept."""
    kernel = await trial.kernel()
    result = await kernel.run("print('BEGIN'); print('a' * 20_000_000); print('END')", 30)
    assert result.output.startswith("BEGIN\n"), f"the output begins with {result.output[:20]!r}"
    assert result.output.endswith("\nEND\n"), f"the output ends with {result.output[-20:]!r}"
    assert result.n_dropped > 10_000_000, f"only {result.n_dropped} of 20000000 bytes are said to be left out"


@promise(surface=True)
async def kernel_survives_a_time_limit(trial: PromiseTrial) -> None:
    """At the time limit a cell is interrupted, its output so far is returned, and the state is kept."""
    kernel = await trial.kernel()
    await kernel.run("x = 5", 20)
    for endless in ("import time; print('part'); time.sleep(100)", "print('part')\nwhile True: pass"):
        result = await kernel.run(endless, 0.5)
        same((result.timed_out, result.restarted), (True, False), "time-out and restart")
        assert result.output.startswith("part"), f"what it printed is lost: {result.output!r}"
    assert "5" in (await kernel.run("x", 20)).output, "the state is lost"


@promise(surface=True)
async def dead_kernel_is_restarted(trial: PromiseTrial) -> None:
    """A cell that ends the interpreter, or cannot be interrupted, is reported as a restart; the next one runs."""
    kernel = await trial.kernel()
    result = await kernel.run("import os; os._exit(3)", 20)
    same((bool(result.error), result.restarted, result.timed_out), (True, True, False), "error, restart and time-out")
    result = await kernel.run("import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass", 0.3)
    same((result.timed_out, result.restarted), (True, True), "time-out and restart")
    assert "2" in (await kernel.run("1 + 1", 20)).output, "the next cell does not run"


@promise(surface=True)
async def a_kernel_can_be_restarted(trial: PromiseTrial) -> None:
    """After `restart`, a kernel has no earlier definitions."""
    kernel = await trial.kernel()
    await kernel.run("x = 5", 20)
    await kernel.restart()
    result = await kernel.run("x", 20)
    same((result.error, result.restarted), ("NameError", False), "the error, and whether it is told as a restart")


@promise(surface=True)
async def cell_has_no_input(trial: PromiseTrial) -> None:
    """A cell that reads input fails immediately and does not wait."""
    kernel = await trial.kernel()
    result = await kernel.run("input()", 20)
    same((bool(result.error), result.timed_out), (True, False), "error and time-out")


@promise(surface=True)
async def cell_can_show_an_image(trial: PromiseTrial) -> None:
    """An image that a cell displays is returned unchanged with its media type, separate from the text."""
    kernel = await trial.kernel()
    result = await kernel.run(f"from IPython.display import Image, display\ndisplay(Image(data={_PNG!r}))", 20)
    same([(image.media_type, image.data) for image in result.images], [("image/png", _PNG)], "the images")
    same((await kernel.run("1", 20)).images, (), "the images of the next cell")


@promise(surface=True)
async def an_unknown_kernel_is_a_sandbox_error(trial: PromiseTrial) -> None:
    """Opening a kernel that the image does not have raises SandboxError with its name."""
    with raises(SandboxError, f"kernel-{trial.mark}"):
        await trial.sandbox.open_kernel(f"kernel-{trial.mark}")


@promise()
async def closing_a_kernel_ends_what_it_started(trial: PromiseTrial) -> None:
    """Closing a kernel ends the programs that its cells started, even those that left its session."""
    kernel = await trial.kernel()
    code = f"import subprocess; p = subprocess.Popen(['sleep', '{trial.mark}'], start_new_session=True)"
    same((await kernel.run(code, 20)).error, "", "the error")
    await trial.until_asleep()
    await kernel.close()
    await until(lambda: not trial.sleepers(), "the program was gone")
    await kernel.close()


@promise(surface=True)
async def kernel_starts_in_the_working_folder(trial: PromiseTrial) -> None:
    """A kernel starts in the working folder, finds modules there, and has the environment of commands."""
    await trial.sandbox.write_file(f"module_{trial.mark}.py", b"x = 7")
    kernel = await trial.kernel()
    code = f"import os, module_{trial.mark} as m; print(os.environ['GREETING'], m.x)"
    same((await kernel.run(code, 20)).output, "hello 7\n", "what the kernel sees")


@promise(surface=True)
async def kernels_are_separate(trial: PromiseTrial) -> None:
    """Kernels of one sandbox have their own state and run at the same time."""
    kernels = await asyncio.gather(*(trial.kernel() for _ in range(3)))
    await asyncio.gather(*(kernel.run(f"x = {n}", 30) for n, kernel in enumerate(kernels)))
    results = await asyncio.gather(*(kernel.run("print(x)", 30) for kernel in kernels))
    same([result.output for result in results], ["0\n", "1\n", "2\n"], "what the kernels print")
