"""The two scores of a row whose form has its authors' scorer: the farm's, and that scorer's.

Both are named rewards, so a batch chooses by its `reward`: the default is the farm's; `reward="authors"` makes results
comparable with published ones. `details` say where they differ.
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
    """The verdict of the authors' scorer: `value`, not necessarily in [0, 1]; `right`: the value means "correct".

    `rule` names the scorer, `answer` is the answer that it extracts, None if there is none.
    """

    rule: str
    value: float
    right: bool
    answer: str | None = None


def with_authors(score: Score, authors: AuthorsScore) -> Score:
    """Return the farm's score, which counts unless the batch names `authors`, combined with theirs."""
    answer = None if authors.answer is None else authors.answer[:_SHOWN]
    details: Mapping[str, Any] = {"rule": authors.rule, "score": authors.value, "answer": answer}
    differs = {"differs": True} if authors.right != (score.value == 1.0) else {}
    return Score(
        score.value, {**score.details, "authors": details, **differs}, {FARM: score.value, AUTHORS: authors.value}
    )
