"""Verifies an answer by one of the grader's verifiers, and attributes failures to the policy or to the farm.

Libraries may take their own exceptions for a wrong answer. So a score below 1 stands only if the same grader has scored
the problem's reference answer 1, which is checked once per problem; if it does not, scoring is broken: an error, never
a zero. If a verifier fails on the policy's text, the check is made each time. `process_end.py` attributes the end of a
scorer, with the reference answer as the control. A score below 1 is also the farm's fault if the node was short of a
resource.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farm.errors import EvaluatorError
from workers.evaluators.answers.authors.sympy_rules import SYMPY_RULES
from workers.evaluators.answers.equality import FAMILY, WHOLE_RESPONSE
from workers.evaluators.grading import NO_SETTINGS, Graded, Grader, shared_grader
from workers.evaluators.process_end import Trial, doing, settle
from workers.sandboxes.images.content_store import digest

_VERIFIER_S = 120.0
"""Seconds of wall time for a verifier, which may compute for a few of them."""
_NO_ANSWER = "I do not know."
"""Text that a verifier must be able to score if there is no reference answer."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The score of an answer, in [0, 1], and the reason if the verifier could not read it."""

    value: float
    reason: str = ""


class Verification:
    """Verifies answers to one entry of one family; `reference` is an answer that the verifier must be able to score.

    `settings` are those of the entry's dataset, if they differ from the family's own.
    """

    def __init__(
        self,
        family: str,
        entry: dict[str, Any],
        reference: str | None,
        *,
        settings: Mapping[str, Any] = NO_SETTINGS,
        grader: Grader | None = None,
    ) -> None:
        self._family = family
        self._entry = entry
        self._reference = reference
        self._settings = settings
        self._own_grader = grader
        self._problem = digest(json.dumps([family, entry, dict(settings)]))

    async def score(self, answer: str, timeout_s: float) -> Verified:
        """Score an answer.

        Raises EvaluatorError if the verifier does not give the reference 1, scores outside [0, 1], or the node was
        short of a resource.
        """
        # The answer is verified at most twice, and so is the reference.
        limit_s = min(_VERIFIER_S, timeout_s / 4)
        graded = await settle(
            lambda: self._trial(answer, limit_s), lambda: self._control(limit_s), f"the verifier of {self._family}"
        )
        if graded.refused:
            reason = f"the verifier would evaluate it, and it has {graded.refused}; use literals and arithmetic"
            return Verified(0.0, reason)
        if graded.score is None:
            failure = graded.error or doing(graded.end)[1]
            await self._check_verifier(failure, limit_s)
            return Verified(0.0, f"the verifier cannot read the answer: {failure}")
        if not 0.0 <= graded.score <= 1.0:
            raise EvaluatorError(f"the verifier of {self._family} gave {graded.score}, which is not in [0, 1]")
        if graded.score < 1.0 and self._reference is not None and self._problem not in self._grader.trusted:
            await self._check_verifier(f"it gave an answer {graded.score:g}", limit_s)
        return Verified(graded.score)

    @property
    def _grader(self) -> Grader:
        of_math_verify = self._family in (FAMILY, WHOLE_RESPONSE, *SYMPY_RULES)
        return self._own_grader or shared_grader(FAMILY if of_math_verify else "reasoning-gym")

    async def _trial(self, answer: str, limit_s: float) -> Trial[Graded]:
        graded = await self._ask(answer, limit_s)
        short = bool(graded.end.conditions.shortage) and not graded.refused and graded.score != 1.0
        return Trial(graded, graded.end, passed=graded.replied and not short)

    async def _control(self, limit_s: float) -> str:
        graded = await self._ask(self._reference or _NO_ANSWER, limit_s)
        return "" if graded.replied else f"a scorer of the reference answer: {graded.end.kind}"

    async def _ask(self, answer: str, limit_s: float) -> Graded:
        return await self._grader.score(self._family, self._entry, answer, limit_s, self._settings)

    async def _check_verifier(self, failure: str, limit_s: float) -> None:
        """Score the reference answer, if there is one. Raises EvaluatorError unless it scores 1."""
        graded = await self._ask(self._reference or _NO_ANSWER, limit_s)
        if graded.score is None and not self._reference:
            raise EvaluatorError(f"the verifier of {self._family} failed and there is no reference answer: {failure}")
        if graded.score is None:
            broken = graded.error or graded.refused or graded.end.kind
            raise EvaluatorError(f"the verifier of {self._family} fails on its reference answer: {broken}")
        if self._reference and graded.score < 1.0:
            raise EvaluatorError(f"the verifier of {self._family} gives its reference answer {graded.score:g}, not 1")
        self._grader.trust(self._problem)
