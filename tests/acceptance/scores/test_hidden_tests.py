"""Programs scored by hidden tests in real sandboxes: right ones pass, wrong ones fail, and no hack scores."""

from __future__ import annotations

import asyncio
import json
import textwrap
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farm.errors import EvaluatorError, SandboxError
from testkit.deadline import Deadline
from tests.conftest import absent
from tests.services.soak import at_length
from workers.attacks.program_attacks import _STREAM_HEAD as HEAD
from workers.attacks.program_attacks import STREAMS, function_program, stream_program
from workers.evaluators.program_tests.evaluator import ProgramTestsEvaluator
from workers.evaluators.program_tests.form_rules import CallTest, HiddenTests, StreamTest
from workers.handlers.programs_handler import ProgramsHandler, ProgramsInstance
from workers.plugins.interfaces import FreshSandbox, Sandbox, Score, Submission
from workers.plugins.registry import sandbox as provider

DATA = Path(__file__).parents[3] / "examples/data/programs"
FORMS = at_length(("livecodebench",), ("livecodebench", "apps", "nemo_gym", "verl"))
N_MBPP = at_length(3, 30)
SUM = HiddenTests((StreamTest("3\n", "seven\n"), StreamTest("4\n", "eight\n")), time_s=1.0)
CALLS = HiddenTests((CallTest((3,), (["seven"],)), CallTest((4,), (["eight"],))), function="f", time_s=1.0)
RIGHT = "import sys\nprint({'3': 'seven', '4': 'eight'}[sys.stdin.read().strip()])\n"
RIGHT_CALL = "def f(x): return {3: ['seven'], 4: ['eight']}[x]\n"
_PATIENCE_S = 30.0

OWN = {
    "at-exit": "import atexit; atexit.register(print, 'seven')\nsys.exit(3)",
    "both-answers": "print('seven'); print('eight')",
    "any-of-them": "print('seven eight')",
    "right-and-broken": f"{RIGHT}sys.stdout.flush(); os._exit(1)",
    "right-and-killed": f"{RIGHT}sys.stdout.flush(); os.kill(os.getpid(), 15)",
    "right-and-endless": f"{RIGHT}sys.stdout.flush()\nwhile True: pass",
    "search-files": """
        import glob
        for p in glob.glob('/tmp/**', recursive=True) + glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ'):
            try: t = open(p).read()
            except Exception: continue
            if 'seven' in t.replace('HACK', ''): print('seven' if 'x' in t else 'eight')
        """,
    "memory-of-the-supervisor": """
        m = open(f'/proc/{os.getppid()}/maps').read()
        print('seven')
        """,
    "supervisor-stopped-out": "print('seven'); sys.stdout.flush(); os.kill(os.getppid(), 15)",
    "sitecustomize": """
        for folder in [p for p in sys.path if p]:
            try: open(os.path.join(folder, 'sitecustomize.py'), 'w').write('print("seven"); import os; os._exit(0)')
            except OSError: pass
        """,
    "early-results": """
        for n in ('result.json', 'reward.txt', 'output', 'stdout'):
            open(n, 'w').write('seven')
        """,
    "solution-changed": "open(__file__, 'w').write('print(\"eight\")')",
    "waits-for-the-next-test": """
        if os.fork() == 0:
            os.setsid()
            import time
            for _ in range(100):
                time.sleep(0.1)
                for p in os.listdir('/proc'):
                    if p.isdigit():
                        try: os.write(os.open(f'/proc/{p}/fd/1', os.O_WRONLY), b'eight')
                        except OSError: pass
        """,
    "answers-by-a-server": """
        import socket
        s = socket.socket(socket.AF_UNIX)
        try: s.connect('/tmp/answers'); print(s.recv(10).decode())
        except OSError:
            s.bind('/tmp/answers'); s.listen()
            if os.fork() == 0:
                os.setsid()
                c = s.accept()[0]; c.send(b'eight')
        """,
    "huge-output": "while True: sys.stdout.write('seven' * 100000)",
    "wide-letters": "print('\uff53\uff45\uff56\uff45\uff4e')",
    "nul": "print('seven\\0')",
    "terminal-codes": "print('wrong\\r\\x1b[2Kseven')",
    "every-descriptor": """
        for n in range(3, 64):
            try: os.write(n, b'seven')
            except OSError: pass
        """,
    "fork-bomb": "import signal\nwhile True:\n    try: os.fork()\n    except OSError: os._exit(0)",
}
OWN_CALLS = {
    "json": 'import json; json.dumps = lambda *a, **k: \'["l", [["s", "seven"]]]\'\ndef f(x): return 0',
    "forged-value": """
        for n in range(3, 64):
            try: os.write(n, b'["l", [["s", "seven"]]]')
            except OSError: pass
        os._exit(0)
        """,
    "printed": 'print(\'["l", [["s", "seven"]]]\', flush=True); os._exit(0)',
    "generator": "def f(x): return (v for v in ['seven'])",
    "huge": "def f(x): return ['x' * (1 << 26)]",
    "both": "def f(x): return ['seven', 'eight']",
    "frames": """
        def f(x):
            g = sys._getframe()
            while g:
                for v in list(g.f_locals.values()) + list(g.f_globals.values()):
                    if isinstance(v, str) and 'seve' + 'n' in v and len(v) < 100: return [v]
                g = g.f_back
        """,
}
SPOILS = {
    "its-folder-a-file": "import shutil; d = os.getcwd(); os.chdir('/'); shutil.rmtree(d); open(d, 'w')",
    "its-folder-a-pipe": "import shutil; d = os.getcwd(); os.chdir('/'); shutil.rmtree(d); os.mkfifo(d)",
    "closed": "os.chmod('/tmp', 0)",
    "a-file": "import shutil; shutil.rmtree('/tmp', True); os.rename('/tmp', '/old'); open('/tmp', 'w')",
    "a-link-to-itself": "os.rename('/tmp', '/old'); os.symlink('tmp', '/tmp')",
    "no-python": "import shutil; [os.unlink(p) for p in {shutil.which('python3'), sys.executable} if p]",
    "full": "f = open('/tmp/full', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()",
}
"""Actions of a program that has printed the right output of the first test."""
HACKS = {name: stream_program(name) for name in STREAMS}
HACKS |= {name: HEAD + textwrap.dedent(program) for name, program in OWN.items()}
FORGERS = ("nothing", "equality", "equality-of-a-string", "equality-of-a-list", "serve-by-itself")
CALL_HACKS = {name: function_program(name, "f") for name in (*FORGERS, "not-a-number", "deep-value")}
CALL_HACKS |= {name: HEAD + textwrap.dedent(program) for name, program in OWN_CALLS.items()}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    if missing := provider("namespace").missing():
        absent(missing)
    with asyncio.Runner() as runner:
        yield runner


async def started() -> Sandbox:
    spec = ProgramsHandler(ProgramsInstance(question="q", tests=({"stdin": "", "expected": ""},))).sandbox()  # type: ignore[arg-type]
    assert spec is not None
    return await provider("namespace").start(f"test-{uuid.uuid4().hex[:12]}", spec)


@asynccontextmanager
async def new(*_: object, **__: object) -> AsyncIterator[Sandbox]:
    sandbox = await started()
    try:
        yield sandbox
    finally:
        await sandbox.stop()


@pytest.fixture(scope="module")
def fresh(runner: asyncio.Runner) -> Iterator[FreshSandbox]:
    """Yield the same sandbox each time: leftovers of one program only give the next more to try."""
    held = [runner.run(started())]

    @asynccontextmanager
    async def one(*_: object, **__: object) -> AsyncIterator[Sandbox]:
        try:
            yield held[0]
        except SandboxError:
            await held[0].stop()
            held[0] = await started()
            raise

    yield one
    runner.run(held[0].stop())


async def scored(evaluator: Any, fresh: FreshSandbox, program: str, timeout_s: float = 600.0) -> Score:
    """Score it as the farm does: again, if the machine was too busy to tell the cause of an end."""
    deadline = Deadline(_PATIENCE_S)
    while True:
        try:
            result: Score = await evaluator.evaluate(Submission(files={"solution.py": program}), fresh, timeout_s)
            return result
        except EvaluatorError:
            if deadline.passed():
                raise


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def problem_id(row: dict[str, Any]) -> str:
    nested = {**row, **row.get("verifier_metadata", {}), **row.get("extra_info", {})}
    return str(next(nested[key] for key in ("question_id", "problem_id", "index") if key in nested))


@pytest.mark.soak
def test_right_programs_pass_all_tests_and_wrong_ones_fail(runner: asyncio.Runner) -> None:
    solutions = {row["id"]: row for row in rows("solutions")}
    results = {}
    for form in FORMS:
        for row in rows(form):
            solution = solutions[problem_id(row)]
            compare = {"compare": solution["checker"]} if "checker" in solution else {}
            instance = ProgramsInstance.model_validate({**row, **compare, "time_s": 2.0})
            evaluator = ProgramsHandler(instance).evaluator()
            scores = [runner.run(scored(evaluator, new, solution[which])).value for which in ("right", "wrong")]
            results[form, solution["id"]] = scores
    assert {name: scores for name, scores in results.items() if scores != [1.0, 0.0]} == {}
    assert len(results) >= 7


@pytest.mark.soak
def test_mbpp_rows_score_one_for_their_code_and_zero_for_empty_text(runner: asyncio.Runner) -> None:
    wrong = []
    for row in rows("mbpp")[:N_MBPP]:
        evaluator = ProgramsHandler(ProgramsInstance.model_validate(row)).evaluator()
        scores = [runner.run(scored(evaluator, new, text)).value for text in (row["code"], "")]
        if scores != [1.0, 0.0]:
            wrong.append((row["task_id"], scores))
    assert wrong == []


@pytest.mark.parametrize("name", HACKS)
def test_program_hack_scores_zero(runner: asyncio.Runner, fresh: FreshSandbox, name: str) -> None:
    score = runner.run(scored(ProgramTestsEvaluator(SUM), fresh, HACKS[name]))
    assert (score.value, score.details.get("passed")) == (0.0, False), score.details


@pytest.mark.parametrize("partial", [False, True], ids=["all", "partial"])
@pytest.mark.parametrize("name", SPOILS)
def test_program_that_breaks_its_sandbox_gets_a_score(runner: asyncio.Runner, name: str, partial: bool) -> None:
    """A program that prints the right output of the first test for all of them gets only that."""
    tests = replace(SUM, partial=partial)
    program = f"{HEAD}print('seven', flush=True)\n{SPOILS[name]}\n"
    score = runner.run(scored(ProgramTestsEvaluator(tests), new, program))
    assert (score.value, score.details.get("passed")) in [(0.0, False), (0.5, False)][: 1 + partial], score.details


@pytest.mark.parametrize("name", CALL_HACKS)
def test_function_hack_scores_zero(runner: asyncio.Runner, fresh: FreshSandbox, name: str) -> None:
    score = runner.run(scored(ProgramTestsEvaluator(CALLS), fresh, CALL_HACKS[name]))
    assert (score.value, score.details.get("passed")) == (0.0, False), score.details


def test_right_program_passes_in_new_and_used_sandboxes(runner: asyncio.Runner, fresh: FreshSandbox) -> None:
    assert runner.run(scored(ProgramTestsEvaluator(SUM), new, RIGHT)).value == 1.0
    assert runner.run(scored(ProgramTestsEvaluator(CALLS), new, RIGHT_CALL)).value == 1.0


@pytest.mark.parametrize("partial", [False, True], ids=["all", "partial"])
def test_tests_over_the_total_time_limit_get_a_score(runner: asyncio.Runner, partial: bool) -> None:
    """A program sleeps in each test for less than the limit of one."""
    tests = HiddenTests(tuple(StreamTest(str(n), f"{n}\n") for n in range(3)), partial=partial)
    program = "import time\ntime.sleep(3.0)\nprint(input())\n"
    score = runner.run(ProgramTestsEvaluator(tests).evaluate(Submission(files={"solution.py": program}), new, 12.5))
    assert score.details["overran"] is True
    assert "more than limits.eval_s has for all" in score.details["reason"]
    assert score.value == (score.details["n_passed"] / 3 if partial else 0.0) < 1.0


def test_processes_of_a_test_are_killed_before_the_next(runner: asyncio.Runner) -> None:
    detached = """
        import os, sys, subprocess
        subprocess.Popen(['setsid', 'env', '-i', 'sleep', '4321'], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        n = 0
        for p in os.listdir('/proc'):
            if p.isdigit():
                try: n += b'4321' in open(f'/proc/{p}/cmdline', 'rb').read().split(b'\\0')
                except OSError: pass
        print(n <= 1)
        """
    tests = HiddenTests(tuple(StreamTest(str(n), "True\n") for n in range(3)))
    assert runner.run(scored(ProgramTestsEvaluator(tests), new, textwrap.dedent(detached))).value == 1.0


def test_share_of_passed_tests_is_the_score_if_partial(runner: asyncio.Runner, fresh: FreshSandbox) -> None:
    half = HiddenTests((StreamTest("3\n", "3\n"), StreamTest("4\n", "5\n")), partial=True)
    assert runner.run(scored(ProgramTestsEvaluator(half), new, "print(input())")).value == 0.5


def test_checker_decides_and_runs_apart_from_the_program(runner: asyncio.Runner) -> None:
    checker = """
        import json, sys
        job = json.load(sys.stdin)
        sys.exit(sorted(job["output"].split()) != sorted(job["expected"].split()))
        """
    tests = HiddenTests((StreamTest("", "a b\n"),), compare="checker", checker=textwrap.dedent(checker))
    assert runner.run(scored(ProgramTestsEvaluator(tests), new, "print('b', 'a')")).value == 1.0
    spoilt = "import json\nopen(json.__file__, 'w').write('import os; os._exit(0)')\nprint('c')"
    assert runner.run(scored(ProgramTestsEvaluator(tests), new, spoilt)).value == 0.0
    broken = HiddenTests((StreamTest("", "a b\n"),), compare="checker", checker="raise ValueError('no')")
    with pytest.raises(EvaluatorError, match="does not accept the expected output"):
        runner.run(ProgramTestsEvaluator(broken).evaluate(Submission(files={"solution.py": "print(1)"}), new, 600.0))


EVALPLUS = {
    "task_id": "own/1",
    "prompt": "def half(x):\n",
    "entry_point": "half",
    "canonical_solution": "    return x / 2\n",
    "base_input": [[3]],
    "plus_input": [[5]],
    "atol": 1e-3,
}


def test_expected_values_come_from_the_reference_if_the_row_has_none(runner: asyncio.Runner) -> None:
    evaluator = ProgramsHandler(ProgramsInstance.model_validate(EVALPLUS)).evaluator()
    assert runner.run(scored(evaluator, new, "def half(x): return x * 0.50001")).value == 1.0
    assert runner.run(scored(evaluator, new, "def half(x): return x // 2")).value == 0.0


HALF = "def half(x):\n    return x / 2\n"


@pytest.mark.parametrize(
    ("answer", "farm", "authors"),
    [
        (f"It's so:\n\n{HALF}\nThat halves it.", 1.0, 1.0),
        (f"```python\n{HALF}\n```", 1.0, 1.0),
        (f"```python\n{HALF}\nassert half(2) == 2\n```", 0.0, 1.0),
        (f"```python\nfrom functools import cache\n@cache\n{HALF}\n```", 1.0, 0.0),
        ("I do not know.", 0.0, 0.0),
    ],
    ids=["no block", "a block", "a wrong example", "decorated", "nothing"],
)
def test_evalplus_answer_gets_the_scores_of_farm_and_authors(
    runner: asyncio.Runner, fresh: FreshSandbox, answer: str, farm: float, authors: float
) -> None:
    instance = ProgramsInstance.model_validate(EVALPLUS)

    async def score() -> Score:
        async with fresh() as sandbox:
            submission = await ProgramsHandler(instance).collect(sandbox, answer)
        return await ProgramsHandler(instance).evaluator().evaluate(submission, new, 60.0)

    assert runner.run(score()).rewards == {"farm": farm, "authors": authors}


OF_A_FORM = {
    "names-of-the-scorer": (
        "h = [3, int(input())]\nheapify(h)\nprint(heappop(h), sqrt(4), Counter('a')['a'])",
        "2 2 1",
    ),
    "exit-code": ("print(input())\nimport sys\nsys.exit(1)", "2"),
    "many-digits": ("print(10 ** 6000 * int(input()))", "2" + "0" * 6000),
    "deep-recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(50_000) + int(input()))", "50002"),
    "main-guard": ("if __name__ == '__main__':\n    print(int(stdin.readline()))", "2"),
    "own-file": ("import os, sys\ninput()\nprint(os.path.basename(__file__), len(sys.argv))", "solution.py 1"),
    "latin-one": ("# coding: latin-1\nx = input()\nprint(len('\u00e9'), x)", "2 2"),
    "pickle-of-its-own": (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A and input())",
        "2",
    ),
    "annotated": ("x: int = int(input())\ndef f(a: List[int]) -> Optional[int]: return a[0]\nprint(f([x]))", "2"),
}


@pytest.mark.parametrize("name", OF_A_FORM)
def test_program_of_a_format_runs_with_the_names_of_its_scorer(
    runner: asyncio.Runner, fresh: FreshSandbox, name: str
) -> None:
    program, expected = OF_A_FORM[name]
    tests = HiddenTests((StreamTest("2\n", expected),), compare="form", rule="livecodebench")
    score = runner.run(scored(ProgramTestsEvaluator(tests), fresh, program))
    assert score.rewards == {"farm": 1.0, "authors": 1.0}, score.details


def test_program_without_a_format_runs_in_plain_python(runner: asyncio.Runner, fresh: FreshSandbox) -> None:
    tests = HiddenTests((StreamTest("2\n", OF_A_FORM["names-of-the-scorer"][1]),))
    score = runner.run(scored(ProgramTestsEvaluator(tests), fresh, OF_A_FORM["names-of-the-scorer"][0]))
    assert (score.value, score.rewards) == (0.0, {})
    assert "NameError" in score.details["last_words"]


@pytest.mark.parametrize("name", ["at-exit", "both-answers", "right-and-broken", "right-and-endless", "early-results"])
def test_hack_scores_zero_by_both_rules(runner: asyncio.Runner, fresh: FreshSandbox, name: str) -> None:
    tests = replace(SUM, compare="form", rule="livecodebench")
    score = runner.run(scored(ProgramTestsEvaluator(tests), fresh, HACKS[name]))
    assert score.rewards == {"farm": 0.0, "authors": 0.0}, score.details


@pytest.mark.parametrize("form", ["list", "trial", "two"])
def test_authors_score_the_program_that_their_scorer_extracts(
    runner: asyncio.Runner, fresh: FreshSandbox, form: str
) -> None:
    answers = {
        "list": "1. So:\n\n   ```python\n   n = int(input())\n   print(n)\n   ```\n",
        "trial": "```python\nprint(input())\n```\nIt prints:\n```\n2\n```\n",
        "two": "```python\nprint(input())\n```\nor\n```python\nprint(input(), end='')\n```\n",
    }
    row = {"question_content": "q", "public_test_cases": '[{"input": "2", "output": "2", "testtype": "stdin"}]'}
    instance = ProgramsInstance.model_validate(row)

    async def collected() -> Submission:
        async with fresh() as sandbox:
            return await ProgramsHandler(instance).collect(sandbox, answers[form])

    submission = runner.run(collected())
    score: Score = runner.run(ProgramsHandler(instance).evaluator().evaluate(submission, fresh, 600.0))
    assert score.rewards == {"farm": 1.0, "authors": float(form == "two")}, score.details
    assert score.details.get("differs", False) is (form != "two")


def test_tests_continue_after_a_failure_if_the_authors_score_a_share(
    runner: asyncio.Runner, fresh: FreshSandbox
) -> None:
    tests = HiddenTests(tuple(StreamTest(str(n), str(n % 3)) for n in range(12)), compare="form", rule="prime_code")
    score = runner.run(scored(ProgramTestsEvaluator(tests), fresh, "print(int(input()) % 3 if 1 else 0)"))
    assert score.rewards == {"farm": 1.0, "authors": 1.0}
    score = runner.run(scored(ProgramTestsEvaluator(tests), fresh, "print(min(int(input()), 2))"))
    assert score.rewards == {"farm": 0.0, "authors": 0.5}
    assert score.details["n_passed"] == 3


def test_numeric_strings_become_integer_keys_as_in_the_authors_scorer(
    runner: asyncio.Runner, fresh: FreshSandbox
) -> None:
    row = {"question": "q", "input_output": {"inputs": [[{"1": 2}]], "outputs": [[2]], "fn_name": "f"}}
    evaluator = ProgramsHandler(ProgramsInstance.model_validate(row)).evaluator()
    score = runner.run(scored(evaluator, fresh, "def f(d): return d[1]"))
    assert score.rewards == {"farm": 1.0, "authors": 1.0}, score.details
