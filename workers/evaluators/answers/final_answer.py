"""The final answer of a response: the last box, `<answer>` tag or line `Answer: ...`, else a short text.

Multiple choice by rules: the option that an answer names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from workers.environments import answer_tags
from workers.evaluators.answers.normal_text import without_end, words

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BOX_WITHOUT_BRACES = re.compile(r"\\boxed[ ]([^\s{$][^$\n]*)")
_NEXT_TO = re.compile(r"[\s$,;]*(?:and|or)?[\s$,;]*")
_ANSWER_LINE = re.compile(
    r"^[^\w\n\\{$]{0,16}(?:the )?(?:final )?answer(?: is)?[ \t*_]*[:\uff1a][ \t*_]*(\S.*)$", re.IGNORECASE | re.M
)
_BRACE = re.compile(r"(?<!\\)[{}]")
_MAX_BARE_CHARS = 200
"""Maximum length of a one-line response that counts as an answer without a mark."""
_MAX_LINE_CHARS = 1000
MAX_CHARS = 20_000
"""Maximum characters of an answer."""
_LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*)?[(\[]?([a-z])[)\]]?(?:\s*[.:)]\s*(.*)|\s*)", re.IGNORECASE | re.DOTALL
)
_SAYS = re.compile(r"\b(?:answer|option|choice)(?: to (?:the|this) question)?(?: is:?|:) *", re.IGNORECASE)
LETTERS = ascii_uppercase
MAX_OPTIONS = len(LETTERS)
NONE_NAMED = "it names no option"


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The text of an answer; `marked`: a box, line or tag declared it the answer."""

    text: str = ""
    marked: bool = False


def final_answer(response: str | None, pattern: str = "") -> FinalAnswer:
    """Return the final answer of a response, empty if there is none.

    `pattern` is the row's regular expression; its last match, or that match's first group, is the answer. Text before
    `</think>` is not part of the answer.
    """
    text = _after_thoughts(response)
    if pattern:
        matches = list(re.finditer(pattern, text[-MAX_CHARS:]))
        return _marked(matches[-1].group(1 if matches[-1].re.groups else 0) or "") if matches else FinalAnswer()
    candidates = (_box_mark(text), _last_mark(_BOX_WITHOUT_BRACES, text), _tag_mark(text), _line_mark(text))
    marks = [mark for mark in candidates if mark is not None]
    if marks:
        # The last mark counts; if a box is unclosed the response was cut off, and earlier marks are not the answer.
        _, answer = max(marks, key=lambda mark: mark[0])
        return FinalAnswer() if answer is None else _marked(answer)
    bare = text.strip()
    return FinalAnswer(bare) if len(bare) <= _MAX_BARE_CHARS and "\n" not in bare else FinalAnswer()


def of_text(text: str) -> FinalAnswer:
    """Return the answer in a text extracted by a scorer: its box, or all of it without typesetting."""
    boxed = last_box(text)
    return _marked(text.strip("*_` \t\n") if boxed is None else boxed)


def last_line(response: str | None) -> str:
    """Return the last non-empty line of a response; empty if it is long, or part of the thinking."""
    line = _after_thoughts(response).strip().rpartition("\n")[2].strip()
    return line if len(line) <= _MAX_LINE_CHARS else ""


def _after_thoughts(response: str | None) -> str:
    text = (response or "").rpartition("</think>")[2][-answer_tags.MAX_CHARS :]
    return "" if "<think>" in text else text


def last_box(text: str) -> str | None:
    """Return the contents of the last outermost box; None if there is none, or it is unclosed."""
    mark = _box_mark(text)
    return None if mark is None else mark[1]


def _box_mark(text: str) -> tuple[int, str | None] | None:
    """Return the position of the last outermost box, and its contents; None for these if it is unclosed."""
    closing = _closing_braces(text)
    last: tuple[int, str | None] | None = None
    at = 0
    while match := _BOX.search(text, at):
        start, end = match.end(), closing.get(match.end() - 1)
        if end is None or end - start > MAX_CHARS:
            last, at = (match.start(), None), start
            continue
        last, at = (match.start(), _BOX.sub("{", text[start:end]).strip()), end + 1
    return last


def closing_boxes(response: str | None) -> list[str]:
    """Return the contents of the adjacent boxes at the end of a response: `\\boxed{2} and \\boxed{3}`."""
    text = _after_thoughts(response)
    closing = _closing_braces(text)
    boxes: list[str] = []
    ended = -1
    for match in _BOX.finditer(text):
        end = closing.get(match.end() - 1)
        if match.start() < ended or end is None or end - match.end() > MAX_CHARS:
            continue
        if not _NEXT_TO.fullmatch(text[ended + 1 : match.start()]):
            boxes = []
        boxes.append(text[match.end() : end].strip())
        ended = end
    return boxes


def _last_mark(pattern: re.Pattern[str], text: str) -> tuple[int, str] | None:
    """Return the position of the last match, and the text of its first group."""
    last = next(reversed(list(pattern.finditer(text))), None)
    return None if last is None else (last.start(), last.group(1).strip())


def _tag_mark(text: str) -> tuple[int, str | None] | None:
    span = answer_tags.last_span(text)
    return None if span is None else (span[0], text[slice(*span)].strip().rstrip("*_ "))


def _line_mark(text: str) -> tuple[int, str | None] | None:
    mark = _last_mark(_ANSWER_LINE, text)
    return None if mark is None else (mark[0], mark[1].strip("`").rstrip("*_ "))


def _closing_braces(text: str) -> dict[int, int]:
    """Map the position of each opening brace to that of its closing one, in one pass; escaped braces are ignored."""
    closing, opened = {}, []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    return closing


def _marked(text: str) -> FinalAnswer:
    text = text.strip()
    if len(text) > MAX_CHARS:
        return FinalAnswer()
    text = without_end(text)
    return FinalAnswer(text, bool(text))


def chosen(answer: str, options: Sequence[str]) -> tuple[str, str]:
    """Return the letter of the option that an answer names, or the reason why it names none.

    Accepted: a letter, an option's text, or a letter with the text of the same option; an option that is itself a
    letter is named by that text. A sentence `The answer is ...` counts by its end.
    """
    text = sentence_end(words(answer)) or words(answer)
    for folded in (str, str.casefold):
        by_text = [LETTERS[at] for at, option in enumerate(options) if folded(words(option)) == folded(text)]
        if len(by_text) == 1:
            return by_text[0], ""
    match = _LETTER.fullmatch(text)
    if match is None:
        return "", NONE_NAMED
    letter, rest = match.group(1).upper(), match.group(2)
    at = LETTERS.index(letter)
    if at >= len(options):
        return "", f"there is no option {letter}"
    # An option that equals its letter has its text in the question.
    if rest and options[at] != letter and words(rest).casefold() != words(options[at]).casefold():
        return "", f"it names option {letter}, and gives another text for it"
    return letter, ""


def sentence_end(line: str) -> str:
    """Return the end of a line's only sentence `the answer is ...`; empty if it has none, or several."""
    parts = _SAYS.split(line)
    return words(parts[1]) if len(parts) == 2 else ""
