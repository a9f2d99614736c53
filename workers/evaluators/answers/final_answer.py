r"""The final answer of a response: its last `\boxed{...}`, else its last line `Answer: ...`, else a short text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from workers.environments import answer_tags
from workers.evaluators.answers.normal_text import without_end

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANSWER_LINE = re.compile(
    r"^[ \t>*#_]*(?:the )?(?:final )?answer(?: is)?[ \t*_]*:[ \t*_]*(\S.*)$", re.IGNORECASE | re.M
)
_BRACE = re.compile(r"(?<!\\)[{}]")
_MAX_BARE_CHARS = 200
"""The most characters of a response of one line that is an answer without a mark."""
_MAX_LINE_CHARS = 1000
MAX_CHARS = 20_000
"""The most characters of an answer."""


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The text of an answer; `marked` if a box, a line or a tag said that it is one."""

    text: str = ""
    marked: bool = False


def final_answer(response: str | None, pattern: str = "") -> FinalAnswer:
    """Return the final answer of a response, which is empty if there is none.

    `pattern` is a regular expression of the row's own, whose last match is the answer: its first group, if it has one.
    What a model thought before `</think>` is no answer.
    """
    text = _after_thoughts(response)
    if pattern:
        matches = list(re.finditer(pattern, text[-MAX_CHARS:]))
        return _marked(matches[-1].group(1 if matches[-1].re.groups else 0) or "") if matches else FinalAnswer()
    if (boxed := last_box(text)) is not None:
        return _marked(boxed)
    if (tagged := answer_tags.last_tagged(text)) is not None:
        return _marked(tagged.rstrip("*_ "))
    if lines := _ANSWER_LINE.findall(text):
        return _marked(lines[-1].strip().rstrip("*_ "))
    bare = text.strip()
    return FinalAnswer(bare) if len(bare) <= _MAX_BARE_CHARS and "\n" not in bare else FinalAnswer()


def last_line(response: str | None) -> str:
    """Return the last line of a response that is not empty; an empty text if it is long, or a thought."""
    line = _after_thoughts(response).strip().rpartition("\n")[2].strip()
    return line if len(line) <= _MAX_LINE_CHARS else ""


def _after_thoughts(response: str | None) -> str:
    text = (response or "").rpartition("</think>")[2][-answer_tags.MAX_CHARS :]
    return "" if "<think>" in text else text


def last_box(text: str) -> str | None:
    """Return the contents of the last box whose braces are balanced, without boxes inside; None if there is none."""
    closing = _closing_braces(text)
    boxed, at = None, 0
    while match := _BOX.search(text, at):
        start, end = match.end(), closing.get(match.end() - 1)
        if end is None or end - start > MAX_CHARS:
            at = start
            continue
        boxed, at = text[start:end], end + 1
    return None if boxed is None else _BOX.sub("{", boxed).strip()


def _closing_braces(text: str) -> dict[int, int]:
    """Return for the place of each opening brace that of its closing one, in one pass; escaped braces are none."""
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
