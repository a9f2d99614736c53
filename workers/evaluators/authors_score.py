"""The two scores of a row whose form has a scorer of its own: the farm's, and the one that its authors' scorer gives.

Both are rewards by name, so a batch chooses by its `reward`: nothing for the farm's, `reward="authors"` for results
that are to be compared with published ones. `details` say where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.plugins.interfaces import Score

FARM, AUTHORS = "farm", "authors"
"""Names of the rewards."""
_SHOWN = 500


@dataclass(frozen=True, slots=True)
class AuthorsScore:
    """The verdict of the authors' scorer: `value` as theirs, which need not be in [0, 1]; `right` if it means "right".

    `rule` names the scorer, `answer` is what it takes for the answer, None if it finds none.
    """

    rule: str
    value: float
    right: bool
    answer: str | None = None


def with_authors(score: Score, authors: AuthorsScore) -> Score:
    """Return the farm's score, which counts unless the batch names `authors`, with theirs beside it."""
    answer = None if authors.answer is None else authors.answer[:_SHOWN]
    details: Mapping[str, Any] = {"rule": authors.rule, "score": authors.value, "answer": answer}
    differs = {"differs": True} if authors.right != (score.value == 1.0) else {}
    return Score(
        score.value, {**score.details, "authors": details, **differs}, {FARM: score.value, AUTHORS: authors.value}
    )
