r"""NeMo Gym's server `string_match`: the text in the last box, after `Final answer:`, of the last line, or all of it.

It must equal the gold answer literally or after one of several normalizations; a close number scores 0.98. Rows with
`case_sensitive` require the literal text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from workers.evaluators.answers.reference import BOX, MAX_CHARS, AuthorsRule, Reference, box_at
from workers.evaluators.authors_score import AuthorsScore

_LONGEST = 2000
"""Maximum characters of an answer that is compared after normalization; rows ask for a name or a number."""
_TEXT = re.compile(r"\\text\{\s*(.*?)\s*\}", re.S)
_FINAL_ANSWER = re.compile(r"(?i)(?:final\s+answer|answer)\s*[:\uff1a]\s*(.+)")
_FULL_STOP = re.compile(r"\.\s*$")
_COMMANDS = (
    *("\\boxed", "\\text", "\\textbf", "\\textit", "\\texttt", "\\mathrm", "\\mathbf", "\\mathit", "\\mathsf"),
    *("\\mathbb", "\\mathcal", "\\emph", "\\url"),
)
_UNITS = re.compile(r"\^\{?\\circ\}?|\\circ|\u00b0|cm[\u00b2\u00b3]?|mm|km|m[\u00b2\u00b3]?|kg")
_SIGNS = (
    ("\u00b0", "^\\circ"),
    *((sign, f"^{digit}") for digit, sign in enumerate("\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", 2)),
    *(("\u221a", "\\sqrt"), ("\ufe63", "-"), ("\ufe62", "+"), ("\ufe66", "="), ("\ufe64", "<"), ("\ufe65", ">")),
    *(("\uff1a", ":"), ("\u03c0", "\\pi")),
)
_STATES = (
    *("district of columbia=DC", "new hampshire=NH", "new jersey=NJ", "new mexico=NM", "new york=NY"),
    *("north carolina=NC", "north dakota=ND", "rhode island=RI", "south carolina=SC", "south dakota=SD"),
    *("west virginia=WV", "alabama=AL", "alaska=AK", "arizona=AZ", "arkansas=AR", "california=CA", "colorado=CO"),
    *("connecticut=CT", "delaware=DE", "florida=FL", "georgia=GA", "hawaii=HI", "idaho=ID", "illinois=IL"),
    *("indiana=IN", "iowa=IA", "kansas=KS", "kentucky=KY", "louisiana=LA", "maine=ME", "maryland=MD"),
    *("massachusetts=MA", "michigan=MI", "minnesota=MN", "mississippi=MS", "missouri=MO", "montana=MT"),
    *("nebraska=NE", "nevada=NV", "ohio=OH", "oklahoma=OK", "oregon=OR", "pennsylvania=PA", "tennessee=TN"),
    *("texas=TX", "utah=UT", "vermont=VT", "virginia=VA", "washington=WA", "wisconsin=WI", "wyoming=WY"),
)
_MOST_BOXES = 100
_NEAR, _NEAR_SCORE = 0.98, 0.98


def _rule(mode: str, find: Callable[[str], str | None], *, exact: bool) -> AuthorsRule:
    name = f"string_match_{mode}{'_exact' if exact else ''}"

    def rule(response: str, key: Reference) -> AuthorsScore:
        answer = find(response[-MAX_CHARS:].strip())
        if answer is None:
            return AuthorsScore(name, 0.0, right=False)
        if exact or max(len(answer), len(key.gold)) > _LONGEST:
            value = float(answer.strip() == key.gold.strip())
        else:
            value = _score(key.gold, answer)
        return AuthorsScore(name, value, value > 0.0, answer)

    return rule


def _boxed(text: str) -> str | None:
    """Return the contents of the last closed box, among the last few boxes."""
    starts = [match.start() for match in re.finditer(re.escape(BOX), text)]
    for at in reversed(starts[-_MOST_BOXES:]):
        if (inner := box_at(text, at)) is not None:
            return _without_text(inner.strip()).strip()
    return None


def _final_answer(text: str) -> str | None:
    matches = _FINAL_ANSWER.findall(text)
    if not matches:
        return _boxed(text)
    return _FULL_STOP.split(matches[-1].strip())[0].strip().rstrip(".")


def _last_line(text: str) -> str | None:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


def _all(text: str) -> str | None:
    return text or None


def _without_text(text: str) -> str:
    while match := _TEXT.fullmatch(text):
        text = match.group(1)
    return text


def _score(gold: str, answer: str) -> float:
    one, other = _folded(answer), _folded(gold)
    equal = (str, _as_float, _with_numbers, _without_latex, _without_separators, _with_states)
    if any(form(one) == form(other) for form in equal):
        return 1.0
    if _nearness(other, one) > _NEAR:
        return _NEAR_SCORE
    one, other = _without_units(one), _without_units(other)
    if one == other:
        return 1.0
    return _NEAR_SCORE if _nearness(other, one) > _NEAR else 0.0


def _folded(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    text = text.lower()
    return text.rstrip(".!?") or text


def _as_float(text: str) -> str:
    try:
        return str(float(text.replace("\\%", "").replace("\\$", "").replace("$", "").strip()))
    except ValueError:
        return text


def _with_numbers(text: str) -> str:
    return re.sub(r"(\d+),(\d+)", r"\1\2", text).replace("\\%", "%")


def _without_separators(text: str) -> str:
    replaced = text
    for separator in (",", ";", "and", "or"):
        replaced = replaced.replace(separator, " ")
    # Replacing words by blanks makes it shorter: a text of mostly separators is unchanged.
    return text if len(replaced) < 0.9 * len(text) else " ".join(replaced.split())


def _with_states(text: str) -> str:
    for state in _STATES:
        name, _, letters = state.partition("=")
        text = text.replace(name, letters)
    return _without_separators(text).lower()


def _without_latex(text: str) -> str:
    for command in _COMMANDS:
        while command + "{" in text:
            before, _, after = text.partition(command + "{")
            depth = 1
            for at, char in enumerate(after):
                depth += {"{": 1, "}": -1}.get(char, 0)
                if depth == 0:
                    after = after[:at] + after[at + 1 :]
                    break
            text = before + after
    for token in ("\\(", "\\)", "\\[", "\\]", "$"):
        text = text.replace(token, "")
    return " ".join(text.split())


def _with_signs(text: str) -> str:
    for sign, written in _SIGNS:
        text = text.replace(sign, written)
    return text


def _without_units(text: str) -> str:
    return _UNITS.sub("", _with_signs(_without_latex(text))).strip()


def _nearness(gold: str, answer: str) -> float:
    """Return 1 for two equal numbers, less the farther apart they are; 0 if one is not a number."""
    try:
        answer_number, gold_number = _number(answer), _number(gold)
    except ValueError:
        return 0.0
    return max(0.0, 1.0 - abs(answer_number - gold_number) / max(abs(gold_number), 1e-9)) ** 2


def _number(text: str) -> float:
    for char in "$\u00a3\u20ac%,":
        text = text.replace(char, "")
    text = _UNITS.sub("", _with_signs(text))
    return float(text.replace("\\%", "").replace("\\$", "").strip())


_FIND = {"boxed": _boxed, "final_answer": _final_answer, "last_line": _last_line, "full_response": _all}
STRING_MATCH = {
    f"string_match_{mode}{suffix}": _rule(mode, find, exact=bool(suffix))
    for mode, find in _FIND.items()
    for suffix in ("", "_exact")
}
"""By `extraction_mode`, and with `case_sensitive`."""
