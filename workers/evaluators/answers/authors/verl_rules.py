"""Rules of verl's scorers `gsm8k`, `math_dapo`, `search_r1_like_qa_em` and `math_reward`, and variants of others.

GSM8K: a number after `####`, or with `flexible` the last number, equal to the gold answer as text. verl uses the last
such number of the last 300 characters, skyrl_gym's the first of all.

DAPO: the last line `Answer: ...` of the last 300 characters, equal to the gold answer after normalization; 1 or -1.
verl uses a box if there is no such line. skyrl_gym's `aime` does not, and its answer ends at a `<`. slime's
`math_dapo_utils` does not either; it removes end-of-model marks, and its gold answers are whole numbers.

Search-R1: the last `<answer>`, equal to a gold answer except for case, articles and punctuation. verl scores a quarter
if there are more than ten tags.

MATH: the last box, equal to the gold answer after the normalization of Hendrycks' data set, as in EleutherAI's harness.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import replace

from workers.environments.answer_tags import last_tagged
from workers.evaluators.answers.reference import MAX_CHARS, Reference, box_of_last_mark, last_box
from workers.evaluators.authors_score import AuthorsScore

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
_MARKED_LINE = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.M)
_LAST_CHARS, _LAST_CHARS_OF_BOX = 300, 100
_LONGEST_GOLD = 2000
"""Maximum characters of a gold answer that an answer of 300 can equal after normalization."""
_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_LINE_OF_SKYRL = re.compile(r"(?i)Answer\s*:\s*([^\n<]+)")
_NONE = "[INVALID]"
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_REMOVED_BY_SLIME = ("<|im_end|>", "<|endoftext|>")
_TYPESETTING = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    *((re.compile(rf"(\\{name}\{{)(.*?)(\}})"), r"\2") for name in ("text", "textbf", "overline")),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_MAX_TAGS = 10
_BOX_OF_WORD = "\\boxed "
_REMOVED_FIRST = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)
_UNIT = "\\text{ "


def gsm8k(response: str, key: Reference) -> AuthorsScore:
    matches = _MARKED.findall(response[-_LAST_CHARS:])
    return _gsm8k_score("gsm8k", matches[-1] if matches else None, key)


def gsm8k_of_skyrl(response: str, key: Reference) -> AuthorsScore:
    match = _MARKED.search(response[-MAX_CHARS:])
    return _gsm8k_score("skyrl_gsm8k", None if match is None else match.group(1), key)


def gsm8k_flexible(response: str, key: Reference) -> AuthorsScore:
    numbers = _NUMBER.findall(response[-_LAST_CHARS:])
    # If all matches are only signs the first one counts, as nothing stops the authors' search.
    answer = next((each for each in reversed(numbers) if each != "."), numbers[0] if numbers else None)
    return AuthorsScore("gsm8k_flexible", float(answer == key.gold), answer == key.gold, answer)


def last_marked_line(response: str) -> str | None:
    """Return the text, such as `$72`, of the last line that begins with `####`."""
    lines = _MARKED_LINE.findall(response[-MAX_CHARS:])
    return lines[-1].strip() if lines else None


def _gsm8k_score(rule: str, answer: str | None, key: Reference) -> AuthorsScore:
    right = answer is not None and answer.replace(",", "") == key.gold
    return AuthorsScore(rule, float(right), right, answer)


def dapo(response: str, key: Reference) -> AuthorsScore:
    score = _dapo_score("dapo", _LINE, response, key)
    boxed = last_box(response[-_LAST_CHARS:][-_LAST_CHARS_OF_BOX:]) if score.answer is None else None
    if boxed is None:
        return score
    right = boxed == key.gold
    return AuthorsScore("dapo", 1.0 if right else -1.0, right, boxed)


def dapo_of_skyrl(response: str, key: Reference) -> AuthorsScore:
    return _dapo_score("skyrl_aime", _LINE_OF_SKYRL, response, key)


def dapo_of_slime(response: str, key: Reference) -> AuthorsScore:
    """Score the last line `Answer: ...`. A non-numeric gold answer, on which slime's scorer fails, equals nothing."""
    lines = _LINE.findall(response[-_LAST_CHARS:])
    answer = lines[-1] if lines else None
    gold = whole_number_of_slime(key.gold)
    right = gold is not None and normalized_by_dapo(answer or _NONE, _REMOVED_BY_SLIME) == gold
    for mark in _REMOVED_BY_SLIME:
        answer = answer and answer.replace(mark, "")
    return AuthorsScore("slime_dapo", 1.0 if right else -1.0, right, answer)


def whole_number_of_slime(gold: str) -> str | None:
    """Return the whole number that slime reads in a gold answer, without its fraction; None if not a number."""
    try:
        return str(int(float(normalized_by_dapo(gold[:_LONGEST_GOLD], _REMOVED_BY_SLIME))))
    except (ValueError, OverflowError):
        return None


def _dapo_score(rule: str, pattern: re.Pattern[str], response: str, key: Reference) -> AuthorsScore:
    lines = pattern.findall(response[-_LAST_CHARS:])
    answer = lines[-1] if lines else None
    right = len(key.gold) <= _LONGEST_GOLD and normalized_by_dapo(answer or _NONE) == normalized_by_dapo(key.gold)
    return AuthorsScore(rule, 1.0 if right else -1.0, right, answer)


def normalized_by_dapo(answer: str, also_removed: Sequence[str] = ()) -> str:
    """Return an answer without units, articles and typesetting, removed in the order of the authors' scorer."""
    answer = answer.split("=")[-1]
    for before, after in (*_REPLACED, *((text, "") for text in (*_REMOVED, *also_removed))):
        answer = answer.replace(before, after)
    for pattern, replacement in _TYPESETTING:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def search_r1(response: str, key: Reference) -> AuthorsScore:
    score = search_r1_of_skyrl(response, key)
    many = max(response.count("<answer>"), response.count("</answer>")) > _MAX_TAGS
    return replace(score, rule="search_r1", value=score.value * (0.25 if many else 1.0))


def search_r1_of_skyrl(response: str, key: Reference) -> AuthorsScore:
    answer = last_tagged(response)
    right = answer is not None and any(normalized_words(answer) == normalized_words(gold) for gold in key.golds)
    return AuthorsScore("skyrl_search", float(right), right, answer)


def normalized_words(answer: str) -> str:
    """Return an answer in lower case, without punctuation, articles and redundant spaces."""
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def hendrycks_math(response: str, key: Reference) -> AuthorsScore:
    """Score the last box. Answers that the normalization cannot read are compared literally."""
    answer = _last_box(response[-MAX_CHARS:])
    right = answer is not None and equal_by_hendrycks(answer, key.gold)
    return AuthorsScore("hendrycks_math", float(right), right, answer)


def equal_by_hendrycks(answer: str, gold: str) -> bool:
    """Return whether two answers are equal after normalization; literally, if normalization fails on one."""
    try:
        return normalized_by_hendrycks(answer) == normalized_by_hendrycks(gold)
    except (IndexError, ValueError):
        return answer == gold


def _last_box(text: str) -> str | None:
    if _BOX_OF_WORD in text:
        return text.rpartition(_BOX_OF_WORD)[2].split("$")[0]
    # The authors' scorer also finds the last \fbox, but has no answer in it.
    return box_of_last_mark(text)


def normalized_by_hendrycks(text: str) -> str:
    """Return a normalized answer. Raises IndexError or ValueError where the authors' scorer fails."""
    for before, after in _REMOVED_FIRST:
        text = text.replace(before, after)
    if _UNIT in text:
        # Two units are more than it can read.
        text, _ = text.split(_UNIT)
    for before, after in (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0.")):
        text = text.replace(before, after)
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _with_fractions(_with_roots(text).replace(" ", ""))
    return _with_slash("\\frac{1}{2}" if text == "0.5" else text)


def _with_roots(text: str) -> str:
    first, *rest = text.split("\\sqrt")
    return first + "".join("\\sqrt" + (each if each[0] == "{" else f"{{{each[0]}}}{each[1:]}") for each in rest)


def _with_fractions(text: str) -> str:
    first, *rest = text.split("\\frac")
    pieces = [first]
    for each in rest:
        if each[0] == "{":
            pieces.append(f"\\frac{each}")
            continue
        if len(each) < 2:
            return text
        above, below = each[0], each[1] if each[1] == "{" else f"{{{each[1]}}}"
        pieces.append(f"\\frac{{{above}}}{below}{each[2:]}")
    return "".join(pieces)


def _with_slash(text: str) -> str:
    sides = text.split("/")
    if len(sides) != 2:
        return text
    try:
        above, below = int(sides[0]), int(sides[1])
    except ValueError:
        return text
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
