"""Search-R1 and similar: the last `<answer>`, equal to a gold answer except for case, articles and punctuation.

Reproduces verl's `search_r1_like_qa_em.compute_score`, which scores a quarter if there are more than ten tags, and
skyrl_gym's.
"""

from __future__ import annotations

import re
import string

from workers.environments.answer_tags import last_tagged
from workers.evaluators.answers.authors.answer_key import AnswerKey
from workers.evaluators.authors_score import AuthorsScore

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_MAX_TAGS = 10


def exact(response: str, key: AnswerKey) -> AuthorsScore:
    answer = last_tagged(response)
    right = answer is not None and any(normalized(answer) == normalized(gold) for gold in key.golds)
    many = max(response.count("<answer>"), response.count("</answer>")) > _MAX_TAGS
    return AuthorsScore("search_r1", (0.25 if many else 1.0) if right else 0.0, right, answer)


def exact_of_skyrl(response: str, key: AnswerKey) -> AuthorsScore:
    answer = last_tagged(response)
    right = answer is not None and any(normalized(answer) == normalized(gold) for gold in key.golds)
    return AuthorsScore("skyrl_search", float(right), right, answer)


def normalized(answer: str) -> str:
    """Return an answer in lower case, without punctuation, articles and redundant spaces."""
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_PUNCTUATION)).split())
