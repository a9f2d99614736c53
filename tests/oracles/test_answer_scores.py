"""The farm's own score compared with the authors': never 0 if the answer is right for them, never 1 for a wrong one.

Part of `make test-oracles`, since answers other than text and numbers are compared by a library for mathematics.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.answers.conftest import no_sandbox
from tests.oracles.cases.answer_cases import LIBRARY, RULES, AnswerCase, answer_cases
from tests.oracles.cases.prime_math_cases import PRIME_MATH, prime_math_cases
from tests.oracles.cases.slime_cases import SLIME_RULES, SYMPY_RULES, slime_cases
from tests.oracles.farm_readings import instance_of
from workers.handlers.answer_handler import AnswerHandler
from workers.plugins.interfaces import Score, Submission


async def scored(case: AnswerCase) -> Score:
    evaluator = AnswerHandler(instance_of(case)).evaluator()
    return await evaluator.evaluate(Submission(answer=case.response), no_sandbox, 240)


@pytest.mark.parametrize("rule", [*RULES, LIBRARY, *SLIME_RULES, *SYMPY_RULES, PRIME_MATH])
def test_farm_is_no_stricter_and_accepts_no_wrong_answer(rule: str) -> None:
    cases = (
        prime_math_cases()
        if rule == PRIME_MATH
        else slime_cases(rule)
        if rule.startswith("slime_")
        else answer_cases(rule)
    )

    async def all_of_them() -> list[tuple[AnswerCase, Score]]:
        # a grader is started for each event loop
        return [(case, await scored(case)) for case in cases]

    # words in common are a fraction of a right answer
    least = 1.0 if rule.endswith("f1") else 0.25
    faults = []
    for case, score in asyncio.run(all_of_them()):
        authors_right = score.details["authors"]["score"] >= least
        assert score.rewards == {"farm": score.value, "authors": score.details["authors"]["score"]}
        assert score.details.get("differs", False) is (authors_right != (score.value == 1.0))
        if (case.right and authors_right and score.value < 1.0) or (case.right is False and score.value > 0.0):
            faults.append((case.response[-80:], case.golds, score))
    assert faults == []
