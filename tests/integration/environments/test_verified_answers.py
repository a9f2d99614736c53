"""Answers to problems of environments: the reward is the node's verdict, whatever the environment claims."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import pytest

from farm.errors import EvaluatorError
from tests.integration.environments.conftest import EnvironmentRun
from workers.testing.fakes import answering


@cache
def problem(family: str) -> dict[str, Any]:
    import reasoning_gym

    entry = json.loads(json.dumps(reasoning_gym.create_dataset(family, size=1, seed=7)[0]))
    return {"family": family, "entry": entry}


def reward(loop: asyncio.Runner, kwargs: dict[str, Any], answer: str, eval_s: float = 200.0) -> float:
    """Return the reward of an answer; retried if the machine was too busy to tell, as the farm does."""
    for _ in range(5):
        run = EnvironmentRun("problems", answering(answer), kwargs=kwargs, rewards=[0, 1], limits={"eval_s": eval_s})
        try:
            return loop.run(run.score())
        except EvaluatorError as error:
            if "scored again" not in str(error):
                raise
    raise AssertionError("the machine is too busy")


FAMILIES = (
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24", "simple_integration"),
    *("gcd", "game_of_life_halting", "complex_arithmetic", "arc_agi", "rearc", "time_intervals", "decimal_arithmetic"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_answer_scores_one_and_rubbish_scores_nothing(loop: asyncio.Runner, family: str) -> None:
    wanted = problem(family)["entry"]["answer"]
    if family == "puzzle24":
        wanted = problem(family)["entry"]["metadata"].get("expression", wanted)
    assert reward(loop, problem(family), wanted) == 1.0
    assert reward(loop, problem(family), "rubbish") <= 0.1


_ENDLESS_S = 16.0
"""The limit for an answer that computes until it is killed, after an eighth of it."""
IMPORT = "__import__('{}')"
ATTACKS: dict[str, tuple[str, str]] = {
    "a float of our own": ("string_insertion", "[setattr(__import__('builtins'),'float',lambda *a:1000.0)]"),
    "a float of one": ("string_insertion", "[setattr(__import__('builtins'),'float',lambda *a:1.0)]"),
    "kill of the parent": ("string_insertion", "[__import__('os').kill(__import__('os').getppid(), 9)]"),
    "kill of all": ("n_queens", "[__import__('os').kill(-1, 9)]"),
    "memory of the parent": (
        "spiral_matrix",
        "[open('/proc/%d/mem' % __import__('os').getppid(), 'r+b', 0).write(b'1')]",
    ),
    "memory of its own": ("binary_matrix", "[open('/proc/self/mem', 'r+b', 0).write(b'1')]"),
    "any text in game_of_life_halting": ("game_of_life_halting", "anything"),
    "a power": ("string_insertion", "[9**9**9**9]"),
    "an exit": ("string_insertion", "[__import__('os')._exit(0)]"),
    "an exit of Python": ("spiral_matrix", "exit(0)"),
    "a fault": ("string_insertion", "[__import__('ctypes').string_at(0)]"),
    "a sleep": ("string_insertion", "[__import__('time').sleep(1000)]"),
    "tags": ("gcd", "<answer>" * 130_000),
    "all frames": ("string_insertion", "[f for f in __import__('sys')._current_frames().values()]"),
    "subclasses": ("spiral_matrix", "[().__class__.__base__.__subclasses__()]"),
    "a lambda": ("binary_matrix", "[(lambda: 1)()]"),
    "a walrus": ("n_queens", "[(x := 1)]"),
    "brackets": ("string_insertion", "[" * 100_000),
    "NUL": ("string_insertion", "[1]\0"),
    "half a surrogate": ("gcd", "\ud800"),
    "digits": ("gcd", "9" * 1_000_000),
    "other numbers": ("puzzle24", "4*6*1*1"),
    "letters as numbers": ("countdown", "exp(x - x)"),
    "nan": ("complex_arithmetic", "nan+nanj"),
    "sympy's evaluation": ("simple_integration", "exec('import os; os._exit(0)')"),
    "an attribute of a symbol": ("simple_integration", "x.func.__globals__"),
    "a verdict": ("gcd", '{"score": 1.0}'),
    "a pickle": ("string_insertion", "cos\nsystem\n(S'true'\ntR."),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_text_other_than_an_answer_scores_nothing(loop: asyncio.Runner, name: str) -> None:
    family, answer = ATTACKS[name]
    # a few verifiers give a little to any text
    assert reward(loop, problem(family), answer, _ENDLESS_S if name == "a power" else 200.0) <= 0.1
    assert reward(loop, problem("gcd"), "rubbish") == 0.0


def test_empty_answer_scores_zero(loop: asyncio.Runner) -> None:
    """The environment claims 1 for the step, and 1 at its end."""
    assert reward(loop, problem("gcd"), "") == 0.0


def test_problem_is_verified_with_the_settings_of_its_dataset(loop: asyncio.Runner) -> None:
    numbers = {"question": "", "answer": "0.12345678", "metadata": {}}
    close = {"family": "decimal_arithmetic", "entry": numbers}
    assert reward(loop, close, "0.1234567") == 1.0
    assert reward(loop, {**close, "settings": {"max_num_decimal_places": 8}}, "0.1234567") == 0.0
    assert reward(loop, {**close, "settings": {"max_num_decimal_places": 8}}, "0.12345678") == 1.0


def test_unscorable_problem_is_an_error(loop: asyncio.Runner) -> None:
    with pytest.raises(EvaluatorError, match="prime_factorization fails on its reference answer"):
        reward(loop, {"family": "prime_factorization", "entry": {"answer": "x", "metadata": {}}}, "y")
    with pytest.raises(EvaluatorError, match="nowhere"):
        reward(loop, {"family": "nowhere", "entry": {"answer": "1"}}, "1")
