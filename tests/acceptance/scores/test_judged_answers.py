"""Complete answers get the same rewards as from their formats' own scorers, and the farm's rule errs on none.

`tests/oracles` has the answers; `make test-oracles` runs the scorers again.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from farm.errors import ToolError
from tests.acceptance.scores.test_hidden_tests import fresh, runner
from tests.oracles.whole_answers import REASONS, RECORDED, WHOLE_RULES, answers, is_known, is_right, row_of
from tests.services.soak import at_length
from workers.handlers.programs_handler import _PATH, ProgramsHandler, ProgramsInstance
from workers.plugins.interfaces import FreshSandbox, Score

__all__ = ["fresh", "runner"]

SCORES = json.loads(RECORDED.read_text())
EVERY = at_length(3, 1)
"""One of so many answers is used."""

pytestmark = pytest.mark.soak


def test_recorded_scores_cover_the_current_answers() -> None:
    assert {rule: list(scores) for rule, scores in SCORES.items()} == {rule: [*answers()] for rule in WHOLE_RULES}
    for names, rules, _ in REASONS:
        assert [SCORES[rule][name] for rule in rules for name in names if SCORES[rule][name] == 1.0] == []


@pytest.mark.parametrize("rule", WHOLE_RULES)
def test_answers_get_the_scores_of_their_scorer_and_of_the_farm(
    runner: asyncio.Runner, fresh: FreshSandbox, rule: str
) -> None:
    async def score(instance: ProgramsInstance, answer: str) -> Score:
        async with fresh() as sandbox:
            with pytest.raises(ToolError):
                await sandbox.read_file(_PATH)
            submission = await ProgramsHandler(instance).collect(sandbox, answer)
        return await ProgramsHandler(instance).evaluator().evaluate(submission, fresh, 600.0)

    offset, faults = WHOLE_RULES.index(rule), []
    for name, answer in [*answers().items()][offset % EVERY :: EVERY]:
        instance = ProgramsInstance.model_validate(row_of(rule, name))
        assert instance.rule == rule
        rewards, theirs = runner.run(score(instance, answer)).rewards, SCORES[rule][name]
        if rewards["authors"] != pytest.approx(theirs) and not is_known(rule, name, theirs, rewards["authors"]):
            faults.append(f"{name}: its scorer says {theirs}, the reward `authors` is {rewards['authors']}")
        if rewards["farm"] != float(is_right(rule, name)):
            faults.append(f"{name}: the farm says {rewards['farm']}")
    assert faults == []
