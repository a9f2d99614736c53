"""Rows with an answer: of DAPO, verl, ProRL, Polaris, DeepScaleR, slime, NeMo Gym, SuperGPQA, WebInstruct.

Rows of slime name their rule by `rm_type`. As in slime, the type in a row's `metadata` takes precedence over that of
the command line, here `--set rm_type=...`.
"""

from __future__ import annotations

import contextlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from workers.evaluators.answers.authors.multiple_choice import MODES
from workers.evaluators.answers.authors.rules import NAMES, rule_of_environment, rule_of_source
from workers.evaluators.answers.authors.slime_rules import words_of_choice
from workers.evaluators.answers.final_answer import LETTERS
from workers.row_forms.prompts import messages_of, refuse_media, text_of

_PREFIX = "slime_"
_CHOICE = ("slime_gpqa", "slime_boxed_gpqa")
_N_LETTERS = 10
"""For a row that lists no choices."""
_TEXTS_OF_SLIME = ("correct_answer", "answer_text")
_TEXTS = ("question", "problem")
_GOLDS = ("expected_answer", "answer", "label", "answerKey")
_LEAST_CHOICES = 2
_LONG_GOLD = 120
"""Length of a gold answer above which a row's own pattern would cut the answer, as in its graders."""


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
    choices, letters = _choices_of_slime(metadata)
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
    texts = [str(each) for name in _TEXTS_OF_SLIME if (each := metadata.get(name))] + [text] * bool(text)
    if gold and gold in tuple(letters):
        return {"gold": gold, "options": list(choices or letters), "other_golds": texts}
    if gold or choices or not text:
        named = gold or str(label)
        raise ValueError(
            f"the gold answer {named[:40]!r} names none of the {len(letters)} options of the row's metadata"
        )
    return {"gold": text, "options": [], "other_golds": texts[:-1]}


def _choices_of_slime(metadata: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the texts of the options, none for a row without, and their letters."""
    choices = metadata.get("choices") or ()
    choices = choices.values() if isinstance(choices, Mapping) else choices
    if isinstance(choices, str):
        raise ValueError("the row's metadata.choices is a text: it must be a list, or letters with their texts")
    texts = [str(each) for each in choices]
    letters = LETTERS[: len(texts) or _N_LETTERS]
    valid_letters = metadata.get("valid_letters")
    if valid_letters:
        named = [str(each).upper() for each in valid_letters]
        if named != list(LETTERS[: len(texts) or len(named)]):
            raise ValueError(f"the row's metadata.valid_letters {named} are not the first letters, one for each choice")
        letters = "".join(named)
    return texts, letters


def answer_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an instance of the handler `answer` for a row, or for such fields themselves.

    Columns that do not describe the problem are dropped. Raises ValueError for a row without problem or gold answer.
    """
    if "gold" in row or not isinstance(row, Mapping):
        return dict(row)
    refuse_media(row)
    rule = _rule(row)
    by_letter = asks_for_choice(rule) and "options" not in row
    fields: dict[str, Any] = {**_right_answers(row, by_letter=by_letter), "prompt": messages_of(row)}
    question = next((text for name in _TEXTS if isinstance(text := row.get(name), str) and text), "")
    fields["question"] = question or (text_of(fields["prompt"]) if fields["prompt"] else "")
    if not fields["question"]:
        raise ValueError(
            "the row has no question: neither `question`, `problem`, `prompt` nor `responses_create_params`"
        )
    if by_letter and not fields["prompt"] and not metadata_of(row).get("choices"):
        # Its question shows its options.
        fields["prompt"] = [{"role": "user", "content": fields["question"]}]
    if rule:
        fields["rule"] = rule
    if isinstance(options := row.get("options"), Sequence) and options and not isinstance(options, str):
        fields["options"] = [_option(option) for option in options]
        fields["gold"] = _letter(row, fields["options"], fields["gold"])
    elif not by_letter and (choices := _choices(row)):
        fields["options"], labels = choices
        fields["gold"] = _chosen(row, fields["options"], labels, fields["gold"])
    fields |= _template(row, fields["gold"])
    if isinstance(row.get("evaluated"), bool):
        fields["evaluated"] = row["evaluated"]
    if "judge" in row:
        fields["judge"] = row["judge"]
    elif _asks_for_judge(row) and not fields.get("options"):
        fields["judge"] = {}
    return fields


def _template(row: Mapping[str, Any], gold: str) -> dict[str, Any]:
    """Return the fields of a row's own patterns, one or a list, and of its answer prefix."""
    template = row.get("template_metadata")
    if not isinstance(template, Mapping):
        return {}
    regex = template.get("output_regex")
    patterns = [regex] if isinstance(regex, str) else regex if isinstance(regex, list | tuple) else []
    patterns = [str(pattern) for pattern in patterns if pattern]
    fields: dict[str, Any] = {}
    if patterns and len(gold) <= _LONG_GOLD:
        fields["pattern"], *others = patterns
        if others:
            fields["other_patterns"] = others
    if isinstance(prefix := template.get("answer_prefix"), str) and unicodedata.normalize("NFKC", prefix):
        fields["prefix"] = prefix
    return fields


def _right_answers(row: Mapping[str, Any], *, by_letter: bool) -> dict[str, Any]:
    if by_letter:
        return choice_fields(metadata_of(row), _gold_value(row))
    gold, *others = _golds(row)
    return {"gold": gold, "other_golds": others} if others else {"gold": gold}


def _gold_value(row: Mapping[str, Any]) -> Any:
    reward = row.get("reward_model") or row.get("reward_spec")
    if isinstance(reward, str):
        reward = json.loads(reward)
    value = reward.get("ground_truth") if isinstance(reward, Mapping) else row.get("ground_truth")
    if value is None:
        value = next((row[name] for name in _GOLDS if row.get(name) is not None), None)
    if isinstance(value, Mapping) and "target" in value:
        value = value["target"]
    return value


def _golds(row: Mapping[str, Any]) -> list[str]:
    """Return the gold answers; of a worked-out text with a line `#### 42`, that line's answer."""
    values = _listed(_gold_value(row))
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int | float) or not str(each).strip():
            raise ValueError(f"a gold answer of the row is {str(each)[:40]!r}, neither a text nor a number")
    if not values:
        raise ValueError(
            "the row has no gold answer: `answer`, `expected_answer`, `label`, `answerKey`, `ground_truth` or "
            "`reward_model.ground_truth`"
        )
    return [str(each).strip().rpartition("####")[2].strip() or str(each).strip() for each in values]


def _listed(value: Any) -> list[Any]:
    """Return several gold answers, possibly given as the text of a list, as in Skywork; none for a null."""
    if isinstance(value, str) and value.lstrip().startswith('["') and value.rstrip().endswith('"]'):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _rule(row: Mapping[str, Any]) -> str:
    """Return the name of the authors' scorer for a row; empty if it has no known one."""
    if rule := row.get("rule"):
        return str(rule)
    if mode := row.get("grading_mode"):
        return str(mode) if mode in MODES else ""
    if environment := row.get("env_class"):
        return rule_of_environment(str(environment))
    if rule := rule_of_type(row):
        return rule
    if "reward_model" in row or "ground_truth" in row:
        return rule_of_source(str(row.get("data_source") or ""))
    return ""


def _option(option: Any) -> str:
    return str(next(iter(option.values()))) if isinstance(option, Mapping) and len(option) == 1 else str(option)


def _choices(row: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    """Return the texts and labels of a column `choices`, as in MMLU and ARC; None without one."""
    choices = row.get("choices")
    texts, labels = (choices.get("text"), choices.get("label")) if isinstance(choices, Mapping) else (choices, None)
    if not isinstance(texts, list | tuple) or len(texts) < _LEAST_CHOICES:
        return None
    return [str(text) for text in texts], [str(label) for label in labels or ()]


def _chosen(row: Mapping[str, Any], options: Sequence[str], labels: Sequence[str], gold: str) -> str:
    """Return the letter of the gold choice, given by label, text or letter, or as an index from 0."""
    if gold in labels:
        return LETTERS[labels.index(gold)]
    is_index = isinstance(_gold_value(row), int) or (gold.isdecimal() and gold not in options)
    if is_index and 0 <= int(gold) < len(options):
        return LETTERS[int(gold)]
    return _letter(row, options, gold)


def _letter(row: Mapping[str, Any], options: Sequence[str], gold: str) -> str:
    """Return the letter of the gold option, given by letter, by text, or by both."""
    letter = str(row.get("answer_letter") or "").strip().upper()
    if not letter and gold in options:
        letter = LETTERS[list(options).index(gold)]
    letter = letter or gold.strip().upper()
    if len(letter) != 1 or letter not in LETTERS[: len(options)]:
        raise ValueError(f"the gold answer {gold[:40]!r} names none of the {len(options)} options")
    return letter


def _asks_for_judge(row: Mapping[str, Any]) -> bool:
    """Return whether a row's data set has answers beyond mathematics: WebInstruct-verified, ProRL's STEM."""
    reward = row.get("reward_model")
    return "answer_type" in row or (isinstance(reward, Mapping) and reward.get("style") == "model")
