"""Rules whose scorers apply sympy to a policy's text; each is a verifier of the grader, named like the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from workers.evaluators.answers.authors import deepscaler, prime_math


@dataclass(frozen=True, slots=True)
class SympyRule:
    """`find` extracts the answer from a response, None if there is none; `equal` scores it, 0.0 or 1.0."""

    find: Callable[[str], str | None]
    equal: Callable[[str, dict[str, Any]], float]


SYMPY_RULES: Mapping[str, SympyRule] = {
    **{name: SympyRule(partial(deepscaler.boxed_answer, name), deepscaler.equal) for name in deepscaler.NAMES},
    prime_math.NAME: SympyRule(prime_math.answer_in, prime_math.equal),
}
