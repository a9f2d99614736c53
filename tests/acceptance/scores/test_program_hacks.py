"""Programs that try to pass hidden checks without solving anything: none does. All reference programs still pass."""

from __future__ import annotations

import asyncio
import textwrap
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from examples.problems import humaneval_problems
from farm.errors import EvaluatorError, SandboxError
from testkit.deadline import Deadline
from tests.conftest import absent
from tests.services.soak import at_length
from workers.attacks.program_attacks import _FUNCTION_HEAD as HEAD
from workers.attacks.program_attacks import FUNCTIONS, function_program
from workers.evaluators.programs import ProgramEvaluator
from workers.handlers.code import CodeHandler, CodeInstance
from workers.plugins.interfaces import ExecResult, FreshSandbox, Sandbox, Score, Submission
from workers.plugins.registry import sandbox as provider

PROBLEMS = [CodeInstance.model_validate(problem.fields) for problem in humaneval_problems()]
TEST = "def check(candidate):\n    assert candidate(3) == 'seven'\n    assert candidate(4) == ['eight']\n"
RIGHT = "def f(x): return 'seven' if x == 3 else ['eight']"
OWN = {
    "search-files": """
        import glob
        def f(x):
            for p in glob.glob('/tmp/**', recursive=True):
                try: t = open(p).read()
                except Exception: continue
                if 'seven' in t.replace('HACK', ''): return 'seven'
        """,
    "frames-of-its-caller": """
        def f(x):
            g = sys._getframe()
            while g:
                for v in list(g.f_locals.values()) + list(g.f_globals.values()):
                    if isinstance(v, str) and 'candidate(3)' in v: return 'seven'
                g = g.f_back
        """,
    "huge-value": "def f(x): return 'x' * (1 << 26)",
    "generator": "def f(x): return (v for v in ['seven'])",
    "changed-argument": "def f(x): x = 'seven'",
    "stop-iteration": "def f(x): raise StopIteration('seven')",
    "recursion": "def f(x): return f(x)",
    "alarm": "import signal; signal.alarm(1)\ndef f(x):\n    while True: pass",
}
"""Hacks that know these checks, which expect 'seven' for 3; each is run after HEAD."""
HACKS = {name: function_program(name, "f") for name in FUNCTIONS}
HACKS |= {name: HEAD + textwrap.dedent(program) for name, program in OWN.items()}

REACHING = {
    "its-standard-input": "open(f'/proc/{parent}/fd/0').read()",
    "its-descriptors": "os.readlink(f'/proc/{parent}/fd/1')",
    "its-output": "os.open(f'/proc/{parent}/fd/1', os.O_WRONLY)",
    "its-memory": "open(f'/proc/{parent}/mem', 'r+b').seek(4096)",
    "its-memory-map": "assert open(f'/proc/{parent}/maps').read()",
    "its-environment": "open(f'/proc/{parent}/environ').read()",
    "its-root": "os.listdir(f'/proc/{parent}/root/')",
    "its-folder": "os.chdir(f'/proc/{parent}/cwd')",
    "its-stack": "open(f'/proc/{parent}/syscall').read()",
    "tracing-it": "import ctypes; assert ctypes.CDLL(None).ptrace(16, parent, 0, 0) == 0",
    "seizing-it": "import ctypes; assert ctypes.CDLL(None).ptrace(0x4206, parent, 0, 0) == 0",
    "its-memory-by-call": """
        import ctypes
        class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]
        buf = ctypes.create_string_buffer(64)
        here = ctypes.addressof(buf)
        ours, its = V(here, 64), V(id(os), 64)
        assert ctypes.CDLL(None).process_vm_readv(parent, ctypes.byref(ours), 1, ctypes.byref(its), 1, 0) > 0
        """,
    "its-descriptors-by-call": """
        import ctypes
        assert ctypes.CDLL(None).syscall(438, os.pidfd_open(parent), 1, 0) >= 0
        """,
}
"""Each reaches the right program after it only if it reaches a part of the judge."""

SPOILING = {
    "modules-on-disk": """
        for folder in sys.path:
            for name in ('random', 'json', 'copy'):
                try: open(os.path.join(folder, name + '.py'), 'w').write('import os; os._exit(0)')
                except OSError: pass
        def f(x): pass
        """,
}
"""Code that leaves a sandbox in which no Python program runs correctly any more."""

DEADLY = {
    "kills-itself": "os.kill(os.getpid(), 9)",
    "kills-the-judge": "os.kill(parent, 9)",
    "kills-all": "os.kill(-1, 9)",
    "segmentation-fault": "import ctypes; ctypes.string_at(0)",
    "sleeps": "import time; time.sleep(1000)",
    "stops-itself": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "stops-the-judge": "import signal; os.kill(parent, signal.SIGSTOP)",
}

_PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    missing = provider("namespace").missing()
    if missing:
        absent(missing)
    with asyncio.Runner() as runner:
        yield runner


async def started() -> Sandbox:
    spec = CodeHandler(PROBLEMS[0]).sandbox()
    assert spec is not None
    return await provider("namespace").start(f"test-{uuid.uuid4().hex[:12]}", spec)


@pytest.fixture(scope="module")
def fresh(runner: asyncio.Runner) -> Iterator[FreshSandbox]:
    """Yield the same sandbox each time: leftovers of one program only give the next more to try."""
    sandbox = runner.run(started())

    @asynccontextmanager
    async def one(*_: object, **__: object) -> AsyncIterator[Sandbox]:
        yield sandbox

    yield one
    runner.run(sandbox.stop())


@asynccontextmanager
async def new(*_: object, **__: object) -> AsyncIterator[Sandbox]:
    sandbox = await started()
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def scored_once(fresh: FreshSandbox, program: str, timeout_s: float = 60.0) -> Score:
    evaluator = ProgramEvaluator("def f(x):\n    'Seven.'\n", TEST, "f")
    return await evaluator.evaluate(Submission(files={"solution.py": program}), fresh, timeout_s)


async def scored(fresh: FreshSandbox, program: str, timeout_s: float = 60.0) -> Score:
    """Score it as the farm does: again, if the machine was too busy to tell the cause of an end."""
    deadline = Deadline(_PATIENCE_S)
    while True:
        try:
            return await scored_once(fresh, program, timeout_s)
        except EvaluatorError:
            if deadline.passed():
                raise


@pytest.mark.parametrize("name", HACKS)
def test_no_hack_passes(runner: asyncio.Runner, fresh: FreshSandbox, name: str) -> None:
    score = runner.run(scored(fresh, HACKS[name]))
    assert (score.value, score.details["passed"]) == (0.0, False), score.details


@pytest.mark.parametrize("name", REACHING)
def test_program_cannot_reach_the_judge(runner: asyncio.Runner, fresh: FreshSandbox, name: str) -> None:
    score = runner.run(scored(fresh, f"{HEAD}{textwrap.dedent(REACHING[name])}\n{RIGHT}"))
    assert score.value == 0.0
    assert "Error" in score.details["reason"]


@pytest.mark.parametrize("name", SPOILING)
def test_program_that_damages_its_sandbox_scores_zero(runner: asyncio.Runner, name: str) -> None:
    score = runner.run(scored(new, HEAD + textwrap.dedent(SPOILING[name])))
    assert (score.value, score.details["passed"]) == (0.0, False), score.details


def test_right_program_passes_after_all_hacks(runner: asyncio.Runner, fresh: FreshSandbox) -> None:
    assert runner.run(scored(fresh, RIGHT)).value == 1.0


@pytest.mark.parametrize("name", DEADLY)
def test_program_that_harms_itself_or_its_judge_scores_zero(
    runner: asyncio.Runner, fresh: FreshSandbox, name: str
) -> None:
    assert runner.run(scored(fresh, HEAD + DEADLY[name], 4.0)).value == 0.0


@pytest.mark.parametrize("detached", ["", "os.setsid()"], ids=["children", "detached"])
def test_program_slowed_by_its_own_children_is_timed_out(runner: asyncio.Runner, detached: str) -> None:
    crowd = f"for _ in range(60):\n    if os.fork() == 0:\n        {detached}\n        while True: pass\n"
    score = runner.run(scored_once(new, f"import os\n{crowd}while True: pass\n", 5.0))
    assert (score.value, score.details["timed_out"]) == (0.0, True), score.details


def test_tampering_with_the_echo_function_is_detected(runner: asyncio.Runner, fresh: FreshSandbox) -> None:
    program = "import sys\nsys.modules['__main__'].echo = lambda *a: 'seven'\n" + RIGHT
    score = runner.run(scored(fresh, program))
    assert (score.value, score.details["tampered"]) == (0.0, True)


@pytest.mark.soak
def test_reference_programs_pass_and_broken_ones_fail(runner: asyncio.Runner, fresh: FreshSandbox) -> None:
    # they share a sandbox, to which each writes its judge again
    room = asyncio.Semaphore(1)
    problems, broken = at_length((PROBLEMS[::12], PROBLEMS[::24]), (PROBLEMS, PROBLEMS[::8]))

    async def value(instance: CodeInstance, text: str) -> tuple[float, object]:
        async with room:
            evaluator = CodeHandler(instance).evaluator()
            score = await evaluator.evaluate(Submission(files={"solution.py": text}), fresh, 100.0)
            return score.value, score.details

    async def values() -> tuple[list[tuple[float, object]], list[tuple[float, object]]]:
        right = [value(one, f"{one.prompt}{one.canonical_solution}") for one in problems]
        wrong = [value(one, f"{one.prompt}    return None\n") for one in broken]
        return await asyncio.gather(*right), await asyncio.gather(*wrong)

    right, wrong = runner.run(values())
    assert [(one.task_id, score) for one, score in zip(problems, right, strict=True) if score[0] != 1.0] == []
    assert {score for score, _ in wrong} == {0.0}


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("{'a': (1, 2.5, None, True, b'x', {3}, frozenset([4]), 1j)}",) * 2,
        ("10**5000", "10**5000"),
        ("float('inf')", "float('inf')"),
        ("'\\ud800'", "'\\ud800'"),
        ("type('L', (list,), {})([1])", "[1]"),
        ("__import__('collections').Counter('aa')", "{'a': 2}"),
    ],
)
def test_values_keep_their_types_and_precision(
    runner: asyncio.Runner, fresh: FreshSandbox, returned: str, expected: str
) -> None:
    evaluator = ProgramEvaluator(
        "", f"def check(c):\n    assert c([1]) == {expected}\n    assert c([], k=2) == 2\n", "f"
    )
    program = f"def f(x, k=0):\n    return k or {returned}\n"
    score = runner.run(evaluator.evaluate(Submission(files={"solution.py": program}), fresh, 60.0))
    assert score.value == 1.0, score.details


class EndedCommand:
    """A sandbox in which a command ends in one way; others work normally."""

    def __init__(self, sandbox: Sandbox, ends: list[ExecResult | SandboxError | None]) -> None:
        self._sandbox = sandbox
        self._ends = ends
        self.sandbox_id = sandbox.sandbox_id

    async def write_file(self, path: str, data: bytes) -> None:
        await self._sandbox.write_file(path, data)

    async def exec(self, argv: Any, **options: Any) -> ExecResult:
        end = self._ends.pop(0)
        if isinstance(end, SandboxError):
            raise end
        return end or await self._sandbox.exec(argv, **options)


KILLED = ExecResult(-9, b"", b"")
GONE = SandboxError("sandbox s1 is gone")


@pytest.mark.parametrize(
    ("ends", "value"),
    [
        ([KILLED, None, None], 1.0),
        ([KILLED, None, KILLED], 0.0),
        ([ExecResult(None, b"", b"", timed_out=True), None, None], 1.0),
        ([ExecResult(137, b"", b"", limit="memory limit of 256 MB reached")], 0.0),
        ([GONE, None, GONE], 0.0),
        ([GONE, None, None], 1.0),
        ([KILLED, KILLED], None),
        ([KILLED, GONE], None),
        ([ExecResult(127, b"", b"no python3"), ExecResult(127, b"", b"no python3")], None),
        # a program can choose its end, each time another one
        ([KILLED, None, ExecResult(None, b"", b"", timed_out=True)], 0.0),
    ],
)
def test_right_program_killed_from_outside_is_rerun(
    runner: asyncio.Runner, fresh: FreshSandbox, ends: list[ExecResult | SandboxError | None], value: float | None
) -> None:
    async def score() -> float | None:
        async with fresh() as sandbox:
            one = EndedCommand(sandbox, list(ends))

            @asynccontextmanager
            async def ending(*_: object, **__: object) -> AsyncIterator[Sandbox]:
                yield cast(Sandbox, one)

            try:
                return (await scored_once(ending, RIGHT)).value
            except EvaluatorError:
                return None

    assert runner.run(score()) == value
