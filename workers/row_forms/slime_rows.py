"""Rows of slime: the rule named by their `rm_type`, and the options of rules that need them.

As in slime, the type in a row's `metadata` takes precedence over that of the command line, here `--set rm_type=...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.evaluators.answers.authors.rules import NAMES
from workers.evaluators.answers.authors.slime_rules import words_of_choice
from workers.evaluators.answers.choices import LETTERS

_PREFIX = "slime_"
_CHOICE = ("slime_gpqa", "slime_boxed_gpqa")
_N_LETTERS = 10
"""For a row that lists no choices."""
_TEXTS = ("correct_answer", "answer_text")


def metadata_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = row.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def rule_of_type(row: Mapping[str, Any]) -> str:
    """Return the rule's name for a row's `rm_type`; empty if it has none. Raises ValueError for an unknown one."""
    name = str(metadata_of(row).get("rm_type") or row.get("rm_type") or "").strip()
    if name and _PREFIX + name not in NAMES:
        known = ", ".join(each.removeprefix(_PREFIX) for each in NAMES if each.startswith(_PREFIX))
        raise ValueError(
            f"unknown rm_type {name[:40]!r} of the row; known are: {known}. Give the row a `rule`, or "
            "leave its rm_type out for only the farm's score"
        )
    return _PREFIX + name if name else ""


def asks_for_choice(rule: str) -> bool:
    return rule in _CHOICE


def choice_fields(metadata: Mapping[str, Any], label: Any) -> dict[str, Any]:
    """Return the fields `gold`, `options` and `other_golds` of a row of slime's `gpqa`.

    If a row lists no options, they are the letters. Raises ValueError if the correct one cannot be determined, or the
    letters are not the first ones of the alphabet.
    """
    choices, letters = _choices(metadata)
    gold = metadata.get("correct_letter")
    gold = gold.strip().upper() if isinstance(gold, str) else ""
    text = label.strip() if isinstance(label, str) else ""
    if isinstance(label, int | float) and not isinstance(label, bool) and 0 <= int(label) < len(letters):
        gold = letters[int(label)]
    elif not gold and len(text) == 1 and text.upper() in letters:
        gold = text.upper()
    if not gold and text:
        same = (at for at, choice in enumerate(choices) if words_of_choice(choice) == words_of_choice(text))
        gold = next((letters[at] for at in same), "")
    texts = [str(each) for name in _TEXTS if (each := metadata.get(name))] + [text] * bool(text)
    if gold and gold in tuple(letters):
        return {"gold": gold, "options": list(choices or letters), "other_golds": texts}
    if gold or choices or not text:
        named = gold or str(label)
        raise ValueError(
            f"the gold answer {named[:40]!r} names none of the {len(letters)} options of the row's metadata"
        )
    return {"gold": text, "options": [], "other_golds": texts[:-1]}


def _choices(metadata: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the texts of the options, none for a row without, and their letters."""
    choices = metadata.get("choices") or ()
    choices = choices.values() if isinstance(choices, Mapping) else choices
    if isinstance(choices, str):
        raise ValueError("the row's metadata.choices is a text: it must be a list, or letters with their texts")
    texts = [str(each) for each in choices]
    letters = LETTERS[: len(texts) or _N_LETTERS]
    given = metadata.get("valid_letters")
    if given:
        named = [str(each).upper() for each in given]
        if named != list(LETTERS[: len(texts) or len(named)]):
            raise ValueError(f"the row's metadata.valid_letters {named} are not the first letters, one for each choice")
        letters = "".join(named)
    return texts, letters
