r"""Multiple choice of NeMo Gym's server `mcqa`: the letter or option text in the last box, or after `Answer:`.

The row's `grading_mode` selects the rule. The row's patterns, `template_metadata.output_regex`, are tried first;
`template_metadata.answer_prefix` also introduces an answer in Markdown.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter

from workers.evaluators.answers.final_answer import LETTERS
from workers.evaluators.answers.reference import MAX_CHARS, PATTERN_CHARS, AuthorsRule, Reference, last_box
from workers.evaluators.authors_score import AuthorsScore

_ONLY_LETTER = re.compile(r"^[^A-Za-z]*([A-Z])[^A-Za-z]*$")
_LETTER_FIRST = re.compile(r"^\s*([A-Z])\s*[:).\-]")
_ANSWER = re.compile(r"(?i)answer\s*:\s*(.+)")
_ANSWER_IN_MARKDOWN = re.compile(r"(?im)[*_]{0,2}Answer[*_]{0,2}\s*:[*_\s]{0,2}(.+)")
_MOST_PREFIXES = 200
"""Maximum prefixes at the end of a response to examine, as each may have a long line."""
_TEXT = "\\text{"
_SHORT_BOX = re.compile(r"\\boxed\{([^}]*)\}")
_LETTER_OF_ANSWER = re.compile(r"(?i)[*_]{0,2}Answer[*_]{0,2}\s*:[\s*_]{0,2}\s*([A-Z])(?![a-zA-Z0-9])")
_LETTER = re.compile(r"(?<![A-Za-z])([A-Za-z])(?![A-Za-z])")
_FIRST = re.compile(r"^([a-zA-Z])(?![a-zA-Z0-9])")
_STANDALONE = re.compile(r"\b[A-Z]\b")
_BETWEEN_CHOICES = re.compile(r"(?:\s*[/|&,;]\s*|\s+(?:or|and)\s+|\s+)", re.IGNORECASE)
_OTHER_LETTERS = {
    **dict(zip("\u0623\u0628\u062c\u062f", "ABCD", strict=True)),
    **dict(zip("\u0985\u09ac\u09a1\u09a2", "ABCD", strict=True)),
}
"""Letters of options in Arabic and in Bengali."""
_AS_LATIN = str.maketrans({letter: f" {latin}" for letter, latin in _OTHER_LETTERS.items()})


def _mode(name: str, chosen: Callable[[str, Reference], str | None]) -> AuthorsRule:
    def rule(response: str, key: Reference) -> AuthorsScore:
        text = response[-MAX_CHARS:].strip()
        patterns = (pattern for pattern in (key.pattern, *key.other_patterns) if pattern)
        letters = (_by_pattern(pattern, text, key) for pattern in patterns)
        letter = next((each for each in letters if each), None) or chosen(text, key)
        right = letter is not None and letter == key.gold
        return AuthorsScore(name, float(right), right, letter)

    return rule


def _boxed_letter(text: str, key: Reference) -> str | None:
    inner = last_box(text)
    if inner is None:
        return None
    inner = _without_text(inner.strip())
    match = _ONLY_LETTER.match(inner) or _LETTER_FIRST.match(inner)
    return match.group(1) if match and match.group(1) in LETTERS[: len(key.options)] else None


def _boxed_letter_or_text(text: str, key: Reference) -> str | None:
    if letter := _boxed_letter(text, key):
        return letter
    inner = (last_box(text) or "").strip()
    candidates = [_folded(inner), _folded(_without_text(inner))]
    options = [(letter, _folded(option)) for letter, option in zip(LETTERS, key.options, strict=False)]
    named = {letter for letter, option in options if option and any(option in each for each in candidates)}
    return named.pop() if len(named) == 1 else None


def _after_answer(text: str, key: Reference) -> str | None:
    match = _ANSWER.search(text)
    candidate = _without_text(match.group(1)).strip() if match else ""
    letters = LETTERS[: len(key.options)]
    if len(candidate) == 1 and candidate.isalpha() and candidate.upper() in letters:
        return candidate.upper()
    options = zip(letters, key.options, strict=True)
    return next((each for each, option in options if match and _folded(option) == _folded(candidate)), None)


def _after_answer_in_markdown(text: str, key: Reference) -> str | None:
    letters = LETTERS[: len(key.options)]
    named_letters = (_letter_of(candidate, letters) for candidate in reversed(_lines_of_answers(text, key.prefix)))
    letter = next((letter for letter in named_letters if letter), None)
    return letter or (_boxed_letter(text, key) if key.prefix else None)


def _lines_of_answers(text: str, prefix: str) -> list[str]:
    """Return the text after each `Answer:`, and after each prefix of the row, in order."""
    text = unicodedata.normalize("NFKC", text)
    if not prefix:
        return _ANSWER_IN_MARKDOWN.findall(text)
    text = text[-PATTERN_CHARS:]
    lines = [(match.start(), match.group(1)) for match in _ANSWER_IN_MARKDOWN.finditer(text)]
    begins = re.compile(re.escape(unicodedata.normalize("NFKC", prefix)) + r"\s*", re.IGNORECASE)
    for match in deque(begins.finditer(text), _MOST_PREFIXES):
        end = text.find("\n", match.end())
        lines.append((match.start(), text[match.end() : end if end >= 0 else len(text)]))
    return [line for _, line in sorted(lines, key=itemgetter(0))]


def _letter_of_gpqa(text: str, key: Reference) -> str | None:
    """Return a letter of the last box, alone or among words, else after `Answer:`, like the server gpqa_diamond."""
    letters = LETTERS[: len(key.options)]
    # Up to the last brace, as each box without one would be searched to the end.
    boxes = _SHORT_BOX.findall(text[: text.rfind("}") + 1])
    inner = boxes[-1].strip() if boxes else ""
    named_letters = [inner] if len(inner) == 1 and inner.isupper() else _STANDALONE.findall(inner)
    named_letters = named_letters or [letter.upper() for letter in _LETTER_OF_ANSWER.findall(text)]
    return named_letters[-1] if named_letters and named_letters[-1] in letters else None


def _letter_of(text: str, letters: str) -> str | None:
    text = _with_latin_letters(text).strip("*_` \t\n\r.,;:")
    if _lists_choices(text, letters):
        return None
    if len(text) == 1:
        letter = text
    elif first := _FIRST.match(text):
        letter = first.group(1)
    else:
        letter = next(reversed(_STANDALONE.findall(text)), "")
    return letter.upper() if letter and letter.upper() in letters else None


def _lists_choices(text: str, letters: str) -> bool:
    matches = [match for match in _LETTER.finditer(text) if match.group().upper() in letters]
    return any(
        one.group().upper() != other.group().upper() and _BETWEEN_CHOICES.fullmatch(text, one.end(), other.start())
        for one, other in pairwise(matches)
    )


def _by_pattern(pattern: str, text: str, key: Reference) -> str | None:
    """Return the match of a row's own pattern: any letter, or the option with that text."""
    matches = re.findall(pattern, text[-PATTERN_CHARS:], re.IGNORECASE)
    if not matches:
        return None
    # With several groups the authors' code gets a tuple, and fails.
    captured = matches[-1] if isinstance(matches[-1], str) else ""
    captured = _with_latin_letters(captured.strip()).upper()
    if len(captured) == 1 and captured.isalpha():
        return captured
    options = zip(LETTERS, key.options, strict=False)
    return next((letter for letter, option in options if _folded(option) == _folded(captured)), None)


def _with_latin_letters(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_AS_LATIN).strip()


def _without_text(text: str) -> str:
    while text.startswith(_TEXT) and text.endswith("}"):
        text = text[len(_TEXT) : -1].strip()
    return text


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


MODES = {
    "strict_single_letter_boxed": _mode("strict_single_letter_boxed", _boxed_letter),
    "lenient_boxed": _mode("lenient_boxed", _boxed_letter_or_text),
    "lenient_answer_colon": _mode("lenient_answer_colon", _after_answer),
    "lenient_answer_colon_md": _mode("lenient_answer_colon_md", _after_answer_in_markdown),
    "gpqa_diamond": _mode("gpqa_diamond", _letter_of_gpqa),
}
"""By the row's `grading_mode`, or by the name of a server that has its own rule."""
