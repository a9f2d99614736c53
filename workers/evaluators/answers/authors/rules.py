"""The authors' scorers by name, and the default scorer of a row's source."""

from __future__ import annotations

from collections.abc import Mapping

from workers.evaluators.answers.authors import verl_rules
from workers.evaluators.answers.authors.multiple_choice import MODES
from workers.evaluators.answers.authors.slime_rules import RULES_OF_SLIME
from workers.evaluators.answers.authors.string_match import STRING_MATCH
from workers.evaluators.answers.authors.sympy_rules import PRIME_MATH, SYMPY_RULES
from workers.evaluators.answers.reference import AuthorsRule

RULES: Mapping[str, AuthorsRule] = {
    "gsm8k": verl_rules.gsm8k,
    "gsm8k_flexible": verl_rules.gsm8k_flexible,
    "skyrl_gsm8k": verl_rules.gsm8k_of_skyrl,
    "dapo": verl_rules.dapo,
    "skyrl_aime": verl_rules.dapo_of_skyrl,
    "hendrycks_math": verl_rules.hendrycks_math,
    "search_r1": verl_rules.search_r1,
    "skyrl_search": verl_rules.search_r1_of_skyrl,
    **MODES,
    **STRING_MATCH,
    **RULES_OF_SLIME,
}
LIBRARY = "math_verify"
"""The rule scored by a library in the grader: NeMo Gym's `math_with_judge`, without its judge."""
NAMES = (*RULES, LIBRARY, *SYMPY_RULES)
"""All rules; those that use sympy run in the grader, too."""
OF_WORDS = frozenset({"search_r1", "skyrl_search", "slime_f1", "slime_boxed_f1"})
"""Rules whose answers are names and facts, which the farm compares as words: `1990s` is not a number of seconds."""
OUT_OF_SENTENCES = frozenset({PRIME_MATH})
"""Rules that cut an answer out of a sentence, up to the last `=`: it may be part of a marked answer."""
_OF_WHOLE_NUMBERS = ("slime_dapo", "slime_boxed_dapo")
_ELSE_MARKED = dict.fromkeys(("gsm8k", "skyrl_gsm8k", "gsm8k_flexible"), verl_rules.last_marked_line)
_OF_SOURCES = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(
        ("lighteval/math", "digitallearninggmbh/math-lighteval", "huggingfaceh4/math-500"), "hendrycks_math"
    ),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), "dapo"),
    **{
        f"numina_{name}": PRIME_MATH
        for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
    },
}
_BEGINNINGS = {"aime": "dapo", "searchr1_": "search_r1"}
_OF_ENVIRONMENTS = {"gsm8k": "skyrl_gsm8k", "aime": "skyrl_aime"}


def is_readable_gold(rule: str, gold: str) -> bool:
    """Return whether a scorer can read a gold answer; it fails on others."""
    return rule not in _OF_WHOLE_NUMBERS or verl_rules.whole_number_of_slime(gold) is not None


def else_marked(rule: str, response: str) -> str | None:
    """Return the marked answer of a response if the rule's scorer cannot read it; None if there is none."""
    find = _ELSE_MARKED.get(rule)
    return None if find is None else find(response)


def rule_of_source(data_source: str) -> str:
    """Return the rule of verl's `default_compute_score` for a source; empty if it has none, or of another kind."""
    name = data_source.lower()
    of_beginning = (rule for beginning, rule in _BEGINNINGS.items() if name.startswith(beginning))
    return _OF_SOURCES.get(name) or next(of_beginning, "gsm8k" if "gsm8k" in name else "")


def rule_of_environment(env_class: str) -> str:
    """Return the rule of a skyrl_gym environment that scores one answer; empty for others."""
    return _OF_ENVIRONMENTS.get(env_class, "")
