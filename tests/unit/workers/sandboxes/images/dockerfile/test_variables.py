"""Variables and words of arguments: quotes, escapes, defaults; the cases of BuildKit's own word tests."""

from __future__ import annotations

import pytest

from workers.sandboxes.images.dockerfile.instructions import Expansion, raw_words

VALUES = Expansion({"NAME": "value", "EMPTY": "", "TWO": "a b"})
TEXTS = {
    "$NAME": "value",
    "${NAME}s": "values",
    "x$NAME.y": "xvalue.y",
    "'$NAME'": "$NAME",
    '"$TWO" c': "a b c",
    r"\$NAME": "$NAME",
    r'"a\"b\n"': r"a\"b\n".replace(r"\"", '"'),
    "$UNSET-": "-",
    "${UNSET:-other}": "other",
    "${EMPTY:-other}": "other",
    "${EMPTY-other}": "",
    "${NAME:+yes}": "yes",
    "${UNSET+yes}": "",
    "${UNSET:-${NAME}}": "value",
    "$": "$",
    "a$ b": "a$ b",
}


@pytest.mark.parametrize("written", TEXTS)
def test_text_is_expanded(written: str) -> None:
    assert VALUES.text(written) == TEXTS[written]


@pytest.mark.parametrize("written", ["'a", "${NAME", "${}", "${NAME:#v}", "${NAME//a}", "${UNSET:?must be}"])
def test_invalid_text_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"does not|is not closed|supported forms|no replacement|must be"):
        VALUES.text(written)


@pytest.mark.parametrize(
    ("written", "values", "text"),
    [
        (r"${A#()[]{\}^$.\*\?|\\}", {"A": r"()[]{}^$.*?|\x"}, "x"),
        (r"${A%%\**}", {"A": "xx**"}, "xx"),
        ("${A#*x*y}", {"A": "xxyy"}, "y"),
        ("${A#*}", {"A": "xxyy"}, "xxyy"),
        ("${A#$B}", {"A": "xxyy", "B": "x"}, "xyy"),
        ("${A##*x}", {"A": "xxyy"}, "yy"),
        ("${A##}", {"A": "xxyy"}, "xxyy"),
        (r"${A#?\?}", {"A": "???y"}, "?y"),
        ("${B:-.}${A%x}${B:-.}", {"A": "xxyy"}, ".xxyy."),
        (r"${A%%\**\*}", {"A": "a***yy*"}, "a"),
        ("${A%%$B}", {"A": "xxyy", "B": ""}, "xxyy"),
        ("${A/$B/.} - ${A//$B/.}", {"A": "/foo*/*/*.txt", "B": r"\*/"}, "/foo.*/*.txt - /foo..*.txt"),
        ("${A/$B/} - ${A//$B/}", {"A": "/tmp/tmp/bar.txt", "B": "/tmp"}, "/tmp/bar.txt - /bar.txt"),
        ("${A/$B/$C}", {"A": "http://google.de", "B": "http://", "C": "https://"}, "https://google.de"),
        (r"${A//\//\/}", {"A": "/tmp/foo.txt"}, r"\/tmp\/foo.txt"),
        ("${A/$B/ww}", {"A": "xxyy", "B": ""}, "wwxxyy"),
        ("${A///}${B///}", {"A": "xxyy"}, "xxyy"),
        ("${A#*-}-${A%-*}", {"A": "v1-2-3"}, "2-3-v1-2"),
    ],
)
def test_expansion_modifiers(written: str, values: dict[str, str], text: str) -> None:
    assert Expansion(values).text(written) == text


def test_words_are_split() -> None:
    assert VALUES.words("a 'b c' \"$TWO\" $TWO '' \\ d") == ["a", "b c", "a b", "a b", "", " d"]
    assert raw_words("a='b c'  d=\\ e") == ["a='b c'", "d=\\ e"]
    assert VALUES.pairs('A=1 B="x y" C=$NAME D=\\$') == [("A", "1"), ("B", "x y"), ("C", "value"), ("D", "$")]
    with pytest.raises(ValueError, match="NAME=VALUE"):
        VALUES.pairs("A=1 B")


def test_heredoc_keeps_its_quotes() -> None:
    assert VALUES.inner("\"$NAME\" '$NAME' \\$NAME") == "\"value\" 'value' $NAME"
