"""The IPython of the python tool, forked outside the sandbox and moved inside."""

from __future__ import annotations

import ast
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.contract.conftest import Start
from tests.contract.sandboxes.sandbox_kinds import python
from tests.services.farms import until
from workers.plugins.interfaces import Kernel, Sandbox, SandboxProvider
from workers.sandboxes.kernel import interpreter
from workers.sandboxes.kernel import zygote_pool as zygote_pool_module
from workers.sandboxes.kernel.zygote_pool import zygote_pool

Run: TypeAlias = Callable[[Any], Any]


@pytest.fixture
def kernel(sandbox: Sandbox, run: Run) -> Iterator[Kernel]:
    opened = run(sandbox.open_kernel())
    yield opened
    run(opened.close())


def _zygotes() -> list[int]:
    return [zygote.process.pid for zygote in zygote_pool().living()]


def value(kernel: Kernel, run: Run, expression: str) -> Any:
    """Evaluate an expression of plain values inside and return its value."""
    return ast.literal_eval(run(kernel.run(f"print(ascii({expression}))", 20)).output)


def test_output_is_in_the_order_written(kernel: Kernel, run: Run) -> None:
    code = (
        "import os, sys; print('a'); os.write(2, b'b\\n'); print('c', file=sys.stderr); os.system('echo d'); print('e')"
    )
    assert run(kernel.run(f"{code}\n!echo f\nprint('g')", 10)).output.split() == list("abcdefg")


def test_hundred_megabytes_of_output_are_cut(kernel: Kernel, run: Run) -> None:
    result = run(kernel.run("import os; b = b'x' * 1_000_000\nfor _ in range(100): os.write(1, b)", 60))
    assert not result.timed_out
    assert len(result.output) < 300_000
    assert result.n_dropped == 100_000_000 - 200_000


def test_forked_process_ends_with_its_cell(kernel: Kernel, run: Run) -> None:
    run(kernel.run("import os; own = os.getpid(); child = os.fork()\nif child: _ = os.waitpid(child, 0)", 10))
    for _ in range(3):
        assert run(kernel.run("print(os.getpid() == own)", 10)).output == "True\n"


def test_forged_results_do_not_shift_later_cells(kernel: Kernel, run: Run) -> None:
    frame = "f = lambda **head: (lambda h: struct.pack('!II', len(h), 0) + h)(json.dumps(head).encode())\n"
    sending = (
        "import json, os, struct, time\n"
        + frame
        + "for cell in (1, 1, 2, 3, 9): os.write(3, f(cell=cell, error='Forged', images=[]))\n"
        + "time.sleep(0.3); print('late')"
    )
    assert run(kernel.run(sending, 10)).error == "Forged"
    assert run(kernel.run("print('second')", 10)).error == "Forged"
    for number in range(3, 9):
        run(kernel.run(f"x = {number}", 10))
    assert run(kernel.run("print(x)", 10)).output.endswith("8\n")


@pytest.mark.parametrize(
    "forged",
    [
        b"\xff" * 8,
        b"\0\0\0\x02\0\0\0\0[]",
        b"\0\0\0\x05\0\0\0\0{]}}}",
        b"\0\0\0\x0a\0\0\0\0" + b'{"cell":1}',
        json.dumps({"cell": 1, "error": "", "images": [["image/png", 9]]}).encode(),
        json.dumps({"cell": 1, "error": "", "images": [["image/png", -1], 5]}).encode(),
        json.dumps({"cell": 1, "error": "", "images": [["text/html", 0]]}).encode(),
        json.dumps({"cell": 1, "error": "", "images": 7}).encode(),
        b"[" * 60_000,
    ],
)
def test_invalid_result_frame_counts_as_death(forged: bytes, kernel: Kernel, run: Run) -> None:
    whole = forged if forged[:1] in (b"\xff", b"\0") else len(forged).to_bytes(4, "big") + b"\0\0\0\0" + forged
    result = run(kernel.run(f"import os, time; os.write(3, {whole!r}); time.sleep(9)", 20))
    assert (result.error, result.restarted) == ("Died", True)
    assert run(kernel.run("print(1)", 10)).output == "1\n"


def test_cell_may_await_coroutines(kernel: Kernel, run: Run) -> None:
    assert run(kernel.run("import asyncio\nawait asyncio.sleep(0, 'done')", 10)).output == "Out[1]: 'done'\n"


def test_many_values_are_numbered_in_order(kernel: Kernel, run: Run) -> None:
    for number in range(1, 131):
        assert run(kernel.run(f"{number} + 0", 10)).output == f"Out[{number}]: {number}\n"


def test_exit_keeps_the_session(kernel: Kernel, run: Run) -> None:
    for code in ("exit", "quit()"):
        result = run(kernel.run(code, 10))
        assert (result.error, result.restarted) == ("", False)
        assert "session stays" in result.output


def test_unusable_settings_folder_is_tolerated(sandbox: Sandbox, run: Run) -> None:
    run(sandbox.exec(["bash", "-c", "rm -rf /tmp/.ipython; touch /tmp/.ipython"], timeout_s=5))
    kernel = run(sandbox.open_kernel())
    assert run(kernel.run("print(1)", 10)).output == "1\n"
    run(kernel.close())


def test_kernel_equals_a_program_started_inside(sandbox: Sandbox, kernel: Kernel, run: Run) -> None:
    """Environment, folder, user, rights, limits, namespaces, open files: as with `exec`."""
    program = """
import os, re, resource, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
rights = "Uid", "Gid", "Groups", "CapEff", "CapPrm", "CapBnd", "CapInh", "NoNewPrivs", "SigBlk", "Seccomp"
mine = {name: status[name].split() for name in rights}
limits = [name for name in dir(resource) if name.startswith("RLIMIT")]
mine["limits"] = {name: resource.getrlimit(getattr(resource, name)) for name in limits}
mine["groups"] = open("/proc/self/cgroup").read()
mine["killed_first"] = open("/proc/self/oom_score_adj").read()
mine["namespaces"] = {name: os.readlink("/proc/self/ns/" + name) for name in sorted(os.listdir("/proc/self/ns"))}
mine["env"] = {name: text for name, text in os.environ.items() if name not in ("SANDBOX_COMMAND", "_", "SHLVL", "PWD")}
mine["cwd"], mine["mask"], mine["prefix"] = os.getcwd(), os.umask(0o22), sys.prefix
mine["mounts"] = [line.split(" ", 3)[3] for line in open("/proc/self/mountinfo")]
mine["path"] = [path for path in sys.path if "/kernels/" not in path]
mine["session"] = os.getsid(0) == os.getpid()
mine["pipe"] = signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN
"""
    started = run(sandbox.exec(["python3", "-c", program + "print(ascii(mine))"], timeout_s=20))
    assert started.code == 0, started.stderr
    assert value(kernel, run, "0") == 0
    run(kernel.run(program, 20))
    assert value(kernel, run, "mine") == ast.literal_eval(started.stdout.decode())


def test_kernel_holds_no_descriptor_of_the_host(kernel: Kernel, run: Run) -> None:
    own = "/proc/self/fd/"
    run(kernel.run("import os", 10))
    held = value(
        kernel, run, f"{{n: os.readlink('{own}' + n) for n in os.listdir('{own}') if os.path.exists('{own}' + n)}}"
    )
    assert set(held) == {"0", "1", "2", "3", "4"}
    assert held["0"] == "/dev/null"
    assert all(link.startswith(("pipe:", "socket:")) for number, link in held.items() if number != "0")
    # its program's file is not the host's, which it could change if it has write access there
    assert value(kernel, run, "os.readlink('/proc/self/exe')").startswith("/memfd:")
    with_error = run(kernel.run("open('/proc/self/exe', 'r+b').write(b'x')", 10))
    assert with_error.error in ("OSError", "PermissionError")
    assert not {name for name in os.environ if name.startswith("FARM_")} & set(value(kernel, run, "list(os.environ)"))


def test_kernel_memory_contains_no_variable_of_the_worker(sandbox: Sandbox, run: Run) -> None:
    search = """
import os, re
found, memory = [], os.open("/proc/self/mem", os.O_RDONLY)
for line in open("/proc/self/maps").read().splitlines():
    start, end = (int(number, 16) for number in line.split()[0].split("-"))
    try: data = os.pread(memory, end - start, start)
    except OSError: continue
    found += re.findall(rb"(?:worker|kernel)-only-[0-9a-f]{16}", data)
"""
    for pid in _zygotes():
        os.kill(pid, signal.SIGKILL)
    os.environ["FARM_TEST_SECRET"] = "worker-only-0123456789abcdef"
    try:
        kernel = run(sandbox.open_kernel())
        run(kernel.run("shown = 'kernel-only-' + '0123456789abcdef'", 10))
        run(kernel.run(search, 60))
        assert set(value(kernel, run, "found")) == {b"kernel-only-0123456789abcdef"}
        run(kernel.close())
    finally:
        del os.environ["FARM_TEST_SECRET"]


def test_killed_zygote_is_replaced(sandbox: Sandbox, kernel: Kernel, run: Run) -> None:
    run(kernel.run("x = 5", 10))
    assert _zygotes()
    for pid in _zygotes():
        os.kill(pid, signal.SIGKILL)
    assert run(kernel.run("print(x)", 10)).output == "5\n"
    for _ in range(2):
        other = run(sandbox.open_kernel())
        assert run(other.run("print(6)", 10)).output == "6\n"
        run(other.close())
    assert run(kernel.run("while True: pass", 0.5)).timed_out
    assert run(kernel.run("print(x)", 10)).output == "5\n"


def test_zygote_that_cannot_start_is_reported_once_with_its_reason(
    sandbox: Sandbox, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = zygote_pool_module.ZygotePool()
    monkeypatch.setattr(interpreter, "zygote_pool", lambda: broken)
    monkeypatch.setattr(zygote_pool_module, "BOOTSTRAP", "import no_such_{module}")
    for _ in range(2):
        kernel = run(sandbox.open_kernel())
        assert run(kernel.run("print(6)", 20)).output == "6\n"
        run(kernel.close())
    (warning,) = [record.message for record in caplog.records if "Zygote not available" in record.message]
    assert "ended with status 1: ModuleNotFoundError: No module named 'no_such_zygote'" in warning


def test_stopped_zygote_does_not_block_its_kernels(sandbox: Sandbox, kernel: Kernel, run: Run) -> None:
    pids = _zygotes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert run(kernel.run("print(6)", 10)).output == "6\n"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_python_variables_are_applied(start: Start, run: Run) -> None:
    """They are read when Python starts, so this one is not forked."""
    sandbox = start(env={"PYTHONPATH": "/workspace/library", "PYTHONHASHSEED": "0"})
    run(sandbox.write_file("/workspace/library/in_library.py", b"x = 7"))
    kernel = run(sandbox.open_kernel())
    assert run(kernel.run("import in_library; print(in_library.x)", 20)).output == "7\n"
    expected = run(sandbox.exec(["python3", "-c", "print(hash('text'))"], timeout_s=20)).stdout.decode()
    assert run(kernel.run("print(hash('text'))", 20)).output == expected
    assert run(kernel.run("import time; print('part'); time.sleep(9)", 0.5)).output.startswith("part\n")
    assert run(kernel.run("import os; print('part'); os._exit(1)", 10)).error == "Died"
    assert run(kernel.run("1 + 1", 20)).output == "Out[1]: 2\n"
    run(kernel.close())


def test_fake_root_may_change_owners(start: Start, run: Run) -> None:
    kernel = run(start(fake_root=True).open_kernel())
    assert run(kernel.run("import os; open('f', 'w').close(); os.chown('f', 7, 7); print('ok')", 20)).output == "ok\n"
    run(kernel.close())


def test_kernel_starts_without_a_working_folder(start: Start, run: Run) -> None:
    sandbox = start()
    run(sandbox.exec(["bash", "-c", "cd /; rm -rf /workspace"], timeout_s=5))
    kernel = run(sandbox.open_kernel())
    assert run(kernel.run("print(1)", 20)).output == "1\n"
    run(kernel.close())


def test_limits_are_reported(start: Start, run: Run) -> None:
    sandbox = start(limits={"memory_mb": 300, "cpu_s": 3, "n_processes": 60})
    kernel = run(sandbox.open_kernel())
    hog = run(kernel.run("print('part')\nx = []\nwhile True: x.append(bytes(10_000_000))", 60))
    assert hog.output.startswith("part\n")
    assert "MemoryError" in hog.error or ("memory" in hog.limit and hog.restarted)
    busy = run(kernel.run("print('part')\nwhile True: pass", 60))
    assert busy.restarted
    assert "CPU time" in busy.output + busy.limit
    bomb = run(kernel.run("import os\nwhile True: os.fork()", 3))
    assert bomb.error == "BlockingIOError" or bomb.timed_out or "process limit" in bomb.limit
    # the output of its processes may arrive late, and end the kernel, which is then replaced
    assert any("6\n" in run(kernel.run("print(6)", 30)).output for _ in range(2))
    run(kernel.close())


def test_closed_kernel_leaves_nothing_on_the_host(start: Start, run: Run) -> None:
    sandbox = start()
    before = set(_children_of_zygotes())
    kernel = run(sandbox.open_kernel())
    until(lambda: len(set(_children_of_zygotes()) - before) == 1, "what led it inside is gone")
    run(kernel.close())
    until(lambda: set(_children_of_zygotes()) <= before, "the kernel's process is gone")


def test_killed_worker_leaves_no_kernel(sandbox: Sandbox, provider: SandboxProvider, run: Run) -> None:
    code = f"""
import asyncio
from farm.records.request import SandboxSpec
from {type(provider).__module__} import {type(provider).__name__}

async def main():
    sandbox = await {type(provider).__name__}().attach({sandbox.sandbox_id!r}, SandboxSpec())
    kernel = await sandbox.open_kernel()
    await kernel.run("open('/tmp/begun', 'w').close()\\nwhile True: pass", 600)

asyncio.run(main())
"""

    def lines(command: str) -> list[str]:
        return str(run(sandbox.exec(["bash", "-c", command], timeout_s=10)).stdout.decode()).split()

    with python(code) as worker:
        until(lambda: lines("echo /tmp/begu[n]") == ["/tmp/begun"], "its cell has begun")
        before = len(lines("echo /proc/[0-9]*"))
        worker.kill()
        until(lambda: len(lines("echo /proc/[0-9]*")) == before - 1, "the kernel has ended")


def _children_of_zygotes() -> list[str]:
    return [pid for zygote in _zygotes() for pid in Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()]
