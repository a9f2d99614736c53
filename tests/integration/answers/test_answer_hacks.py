"""Answers that try to score without solving anything: none does, and none changes the scores of others."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.integration.answers.conftest import Graded, entry, no_sandbox
from workers.environments.computing_calls import allow_only_computing
from workers.evaluators.answer import AnswerEvaluator
from workers.evaluators.grading import Grader
from workers.evaluators.scorer import refusal
from workers.plugins.interfaces import Score, Submission
from workers.sandboxes.isolation.linux import no_new_privileges

WRITE_SCORE = "[__import__('os').write(n, b'{{\"score\": 1.0}}') for n in range({first}, 64)]"
EVALUATED = {
    "builtins-float": "setattr(__import__('builtins'), 'float', lambda *a: 1.0)",
    "builtins-by-frame": "[i for i in ().__class__.__base__.__subclasses__()]",
    "oracle-answer": "[oracle_answer]",
    "oracle-answer-itself": "oracle_answer",
    "oracle-by-entry": "entry['answer']",
    "oracle-by-self": "self.score_answer.__globals__",
    "locals": "list(locals().values())",
    "vars": "vars()",
    "globals": "globals()['__builtins__']",
    "frame": "__import__('sys')._getframe(1).f_locals['oracle_answer']",
    "generator-frame": "(lambda g: g.gi_frame.f_back)(x for x in [1])",
    "traceback": "[1/0 for x in [1]]",
    "gc-objects": "__import__('gc').get_objects()",
    "modules": "__import__('sys').modules['__main__'].__dict__.update(_checked=lambda *a: {'score': 1.0})",
    "write-every-descriptor": WRITE_SCORE.format(first=0),
    "write-and-exit": "[" + WRITE_SCORE.format(first=3) + ", __import__('os')._exit(0)]",
    "exit": "[__import__('os')._exit(0)]",
    "system-exit": "exit(0)",
    "print": "print('{\"score\": 1.0}')",
    "walrus": "[(a := oracle_answer)]",
    "comprehension": "[x for x in [oracle_answer]]",
    "f-string": "f'{oracle_answer}'",
    "format": "'{0.__class__}'.format(answer)",
    "lambda": "(lambda: oracle_answer)()",
    "subscript": "[entry][0]",
    "conditional": "[oracle_answer if 1 else 0]",
    "star": "[*oracle_answer]",
    "call-of-call": "().__class__.__mro__[1].__subclasses__()",
    "comparison": "[answer == oracle_answer]",
    "type": "type('A', (str,), {'__eq__': lambda *a: True})('')",
    "unicode-name": "[\uff4fracle_answer]",
    "open": "[open('/etc/passwd').read()]",
    "threads": "__import__('threading').Thread(target=print).start()",
    "fork": "__import__('os').fork()",
    "signal": "__import__('os').kill(__import__('os').getppid(), 9)",
    "ptrace": "__import__('ctypes').CDLL(None).ptrace(16, __import__('os').getppid(), 0, 0)",
    "import-hook": "__import__('importlib').reload(__import__('json'))",
    "bytes": "b'x'.__class__",
    "await": "await x",
}
"""Answers to families that evaluate them as Python."""

PARSED = {
    "class": "x.__class__.__base__.__subclasses__()",
    "eval": "eval('1')",
    "nested-text": "sympify('__import__(\"os\")._exit(0)')",
    "symbol-of-text": "Symbol('x').func('__import__(\"os\")')",
    "function-of-text": "sin('__import__(\"os\")._exit(0)')",
    "lambdify": "lambdify(x, 'x')",
    "print-descriptors": "print(1)",
    "getattr": "getattr(x, 'is_zero')",
    "infinity": "oo - oo",
    "not-a-number": "nan",
    "derivative": "Derivative(x)",
    "integral": "Integral(x, x)",
    "with-lambda": "Lambda(x, x)(1)",
    "import": "__import__('os')._exit(0)",
}
"""Answers to families that evaluate them by sympy."""

NO_NUMBERS = ["nan", "-nan", "NaN", "nan + nani", "nanj", "inf", "-Infinity", "nan,nan"]
PYTHON = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
SYMPY = ("simple_integration", "intermediate_integration", "polynomial_multiplication", "countdown", "puzzle24")


def scores(graded: Graded, cases: list[tuple[str, str]]) -> list[Score]:
    """Return the scores of answers to problems of families, all by one grader."""

    async def use(grader: Grader) -> list[Score]:
        return [
            await AnswerEvaluator(family, entry(family), grader=grader).evaluate(
                Submission(answer=answer), no_sandbox, 40.0
            )
            for family, answer in cases
        ]

    result: list[Score] = graded(use)
    return result


@pytest.mark.parametrize("family", PYTHON)
def test_no_answer_is_evaluated_as_a_program(graded: Graded, family: str) -> None:
    cases = [(family, answer) for answer in EVALUATED.values()]
    worth = {name: score.value for name, score in zip(EVALUATED, scores(graded, cases), strict=True) if score.value}
    assert worth == {}


@pytest.mark.parametrize("family", SYMPY)
def test_no_answer_is_evaluated_by_sympy_beyond_arithmetic(graded: Graded, family: str) -> None:
    cases = [(family, answer) for answer in PARSED.values()]
    # the minimum that two families give to any answer
    worth = {name: score.value for name, score in zip(PARSED, scores(graded, cases), strict=True) if score.value > 0.05}
    assert worth == {}


@pytest.mark.parametrize(
    "family", ["complex_arithmetic", "gcd", "chain_sum", "polynomial_equations", "simple_equations"]
)
def test_text_without_a_number_scores_zero(graded: Graded, family: str) -> None:
    cases = [(family, answer) for answer in NO_NUMBERS]
    assert [score.value for score in scores(graded, cases)] == [0.0] * len(NO_NUMBERS)


def test_answers_do_not_change_later_scores(graded: Graded) -> None:
    scores(graded, [("string_insertion", answer) for answer in EVALUATED.values()])
    later = scores(graded, [("gcd", "zz"), ("gcd", "nan"), ("simple_equations", "rubbish"), ("chain_sum", "x")])
    assert [score.value for score in later] == [0.0] * 4
    right = scores(graded, [(family, str(entry(family)["answer"])) for family in (*PYTHON, *SYMPY, "gcd")])
    assert [score.value for score in right] == [1.0] * 10


@pytest.mark.parametrize("family", ["countdown", "puzzle24"])
@pytest.mark.parametrize(
    "made", ["{} + cos(x - x) - cos(x - x)", "({}) * factorial(x - x)", "{} + pi - pi", "{} + E - E"]
)
def test_numbers_made_of_names_and_functions_score_nothing(graded: Graded, family: str, made: str) -> None:
    """The reference itself, with an additional number that the verifier does not see as one."""
    answer = made.format(entry(family)["answer"])
    assert scores(graded, [(family, answer)])[0].value <= 0.05


@pytest.mark.parametrize("answer", ["6*4*1*1", "24 + 1 - 1 + 0", "8*3*1*1", "(12 + 12)*1*1"])
def test_answer_with_other_numbers_than_the_puzzle_scores_zero(graded: Graded, answer: str) -> None:
    assert scores(graded, [("puzzle24", answer)])[0].value == 0.0


def test_tiny_numbers_are_compared_by_relative_difference(graded: Graded) -> None:
    """The verifier's tolerance is 1e-4, and the probability of 15 heads in 15 flips is 3e-5."""
    import reasoning_gym

    problems = reasoning_gym.create_dataset("coin_flip", size=300, seed=3, min_trials=14)
    problem = next(each for each in problems if float(each["answer"]) < 1e-4)
    reference = float(problem["answer"])
    right = [problem["answer"], f"1/{round(1 / reference)}", f"{reference:.3e}"]

    async def use(grader: Grader) -> list[float]:
        answers = ["0", "0.0", "1e-5", str(reference * 1.5), *right]
        evaluator = AnswerEvaluator("coin_flip", problem, grader=grader)
        return [(await evaluator.evaluate(Submission(answer=each), no_sandbox, 60.0)).value for each in answers]

    assert graded(use) == [0.0] * 4 + [1.0] * 3


def test_verifier_that_accepts_any_text_is_replaced(graded: Graded) -> None:
    """game_of_life_halting compares the truth of two texts, neither of which is empty."""
    reference = str(entry("game_of_life_halting")["answer"])
    answers = ["rubbish", str(reference != "True"), reference, reference.upper()]
    result = scores(graded, [("game_of_life_halting", answer) for answer in answers])
    assert [score.value for score in result] == [0.0, 0.0, 1.0, 1.0]


def test_lists_and_arithmetic_are_accepted(graded: Graded) -> None:
    inserted = str(list(entry("string_insertion")["answer"]))
    product = f"({entry('polynomial_multiplication')['answer']}) * 1"
    integral = f"{entry('simple_integration')['answer']} + sin(pi) + 0*exp(2)"
    cases = [("string_insertion", inserted), ("polynomial_multiplication", product), ("simple_integration", integral)]
    assert [score.value for score in scores(graded, cases)] == [0.1, 1.0, 1.0]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    # Not tmp_path: whom the grader becomes when started by root could not reach that anyway.
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_answer_with_system_calls_has_no_effect(graded: Graded, open_folder: Path) -> None:
    path = open_folder / "made"
    harms = [
        f"__import__('os').system('touch {path}')",
        f"open('{path}', 'w').write('x')",
        f"__import__('os').open('{path}', 64)",
        f"__import__('ctypes').CDLL(None).mkdir(b'{path}', 511)",
    ]
    assert all(score.value == 0.0 for score in scores(graded, [("spiral_matrix", f"[{harm}]") for harm in harms]))
    assert not path.exists()


@pytest.mark.parametrize(
    "source", ["1", "[1, 'a', (2.5, None)]", "{'a': {1}}", "-x**2/3 + C", "Symbol ('x' )**2", "2*pi"]
)
def test_literals_and_arithmetic_are_in_the_grammar(source: str) -> None:
    assert refusal(source) == ""


@pytest.mark.parametrize(
    "source", [*EVALUATED.values(), "Symbol('a', real=True)", "Symbol(x)", "exp('1')", "ab", "1 < 2"]
)
def test_names_and_attributes_are_refused_by_the_grammar(source: str) -> None:
    # the verifier gets a SyntaxError, too
    with suppress(SyntaxError):
        assert refusal(source)


@pytest.mark.parametrize("source", ["import os", "x = 1", "1; 2", "def f(): pass", "(" * 5000, "1\0"])
def test_statements_and_unparsable_text_are_refused(source: str) -> None:
    with suppress(SyntaxError):
        assert refusal(source)


def test_system_call_filter_allows_only_computing(open_folder: Path) -> None:
    """The filter of system calls, in a fork of this process, without the grammar before it."""
    path = str(open_folder / "made")
    acts: dict[str, Callable[[], object]] = {
        "fork": os.fork,
        "kill": lambda: os.kill(os.getppid(), 0),
        "socket": socket.socket,
        "write": lambda: os.open(path, os.O_WRONLY | os.O_CREAT),
        "truncate": lambda: os.open("/dev/null", os.O_RDONLY | os.O_TRUNC),
        "unlink": lambda: os.unlink(path),  # noqa: PTH108
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "thread": threading.Thread(target=int).start,
        "pipe": os.pipe,
        "pidfd": lambda: os.pidfd_open(os.getppid()),
    }

    def tries() -> list[str]:
        result = []
        for name, act in acts.items():
            try:
                act()
                result.append(name)
            except (PermissionError, RuntimeError):
                continue
        with open("/proc/self/stat") as file:  # noqa: PTH123
            return result if file.read() else ["read"]

    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        no_new_privileges()
        words = "unknown machine" if not allow_only_computing() else ",".join(tries())
        os.write(theirs, words.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as reply:
        assert reply.read() == ""
    assert os.waitpid(pid, 0)[1] == 0
