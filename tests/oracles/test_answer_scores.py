"""The farm's own score beside the authors': never 0 for a right answer that has theirs, never 1 for a wrong one.

Part of `make test-oracles`, as what is not read as text or as numbers is compared by a library of mathematics.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.answers.conftest import no_sandbox
from tests.oracles.cases.answer_cases import LIBRARY, RULES, AnswerCase, answer_cases
from workers.evaluators.answers.equivalence import EquivalenceEvaluator, Reference
from workers.interfaces import Score, Submission


async def scored(case: AnswerCase) -> Score:
    gold, *others = case.golds
    reference = Reference(
        "How many?", gold, case.options, pattern=case.pattern, other_golds=tuple(others), rule=case.rule
    )
    return await EquivalenceEvaluator(reference).evaluate(Submission(answer=case.response), no_sandbox, 240)


@pytest.mark.parametrize("rule", [*RULES, LIBRARY])
def test_the_farm_is_no_stricter_and_takes_no_wrong_answer(rule: str) -> None:
    async def all_of_them() -> list[tuple[AnswerCase, Score]]:
        # a grader is started for each event loop
        return [(case, await scored(case)) for case in answer_cases(rule)]

    faults = []
    for case, score in asyncio.run(all_of_them()):
        authors_right = score.details["authors"]["score"] > 0
        assert score.rewards == {"farm": score.value, "authors": score.details["authors"]["score"]}
        assert score.details.get("differs", False) is (authors_right != (score.value == 1.0))
        if (case.right and authors_right and score.value < 1.0) or (case.right is False and score.value > 0.0):
            faults.append((case.response[-80:], case.golds, score))
    assert faults == []
