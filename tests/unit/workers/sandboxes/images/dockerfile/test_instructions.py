"""Parsing of Dockerfiles: instructions with their lines, flags, forms and heredocs; and errors by line."""

from __future__ import annotations

import pytest

from farm.errors import ImageError
from workers.sandboxes.images.dockerfile.instructions import escape_of, is_only_heredoc, parse

TEXTS = {
    "a comment inside a continuation": ("RUN a && \\\n  # why\n\n  b\n", [("RUN", "a &&   b")]),
    "a comment between": ("# one\nFROM a\n  # two\nRUN b", [("FROM", "a"), ("RUN", "b")]),
    "another escape": ("# escape=`\nFROM a\nRUN dir `\n c:\\", [("FROM", "a"), ("RUN", "dir  c:\\")]),
    "lower case, tabs and Windows lines": ("from a\r\nrun\tb\r\n", [("FROM", "a"), ("RUN", "b")]),
    "a continuation at the end": ("RUN a \\\n", [("RUN", "a")]),
    "a shift is no heredoc": ("RUN echo $((1 <<2)) <<<x", [("RUN", "echo $((1 <<2)) <<<x")]),
    "a directive after a comment is a comment": ("# x\n# escape=`\nRUN a \\\n b", [("RUN", "a  b")]),
}


@pytest.mark.parametrize("case", TEXTS)
def test_instructions_are_parsed(case: str) -> None:
    text, expected = TEXTS[case]
    assert [(each.name, each.text) for each in parse(text)] == expected


def test_flags_and_json_are_parsed() -> None:
    copy, run, plain = parse(
        'COPY --from=b --chown=a:a --link ["x y", "/z/"]\nRUN --mount=type=cache,target=/c a\nRUN [a]'
    )
    assert copy.flags == (("from", "b"), ("chown", "a:a"), ("link", ""))
    assert copy.words == ("x y", "/z/")
    assert (run.flags, run.text) == ((("mount", "type=cache,target=/c"),), "a")
    assert plain.words is None


def test_heredocs_are_parsed() -> None:
    text = "RUN <<EOF\na\n\tb\nEOF\nCOPY <<-'ONE' <<TWO /d/\n\tx\nONE\ny\nTWO\nRUN cat <<A > f\nz\nA\nUSER u"
    script, copy, shell, user = parse(text)
    assert is_only_heredoc(script.text)
    assert script.heredocs[0].text == "a\n\tb\n"
    assert [(each.name, each.text, each.expands) for each in copy.heredocs] == [
        ("ONE", "x\n", False),
        ("TWO", "y\n", True),
    ]
    assert not is_only_heredoc(shell.text)
    assert (user.name, user.line) == ("USER", 13)


BROKEN = {
    "FROM a\nFETCH b": "Dockerfile:2: FETCH: there is no such instruction",
    "FROM a\n\nRUN": "Dockerfile:3: RUN: it needs arguments",
    "RUN <<EOF\na": "Dockerfile:1: RUN <<EOF: its heredoc does not end: no line is EOF",
    "# escape=x\nFROM a": "Dockerfile:1: escape=x",
    "# nothing\n": "Dockerfile has no instructions",
}


@pytest.mark.parametrize("text", BROKEN)
def test_broken_texts_are_refused_by_line(text: str) -> None:
    with pytest.raises(ImageError) as error:
        parse(text)
    assert str(error.value).startswith(BROKEN[text])


def test_escape_directive_is_parsed() -> None:
    assert (escape_of("FROM a"), escape_of("# syntax=x\n# escape = `\n")) == ("\\", "`")
