"""Validation of the arguments and variables of a program against the kernel's limits; violations are ToolErrors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from farm.errors import ToolError

MAX_WORD = 131_071
"""Maximum size of one argument or variable in bytes: the kernel's MAX_ARG_STRLEN without the NUL."""
ALL_WORDS = 2_000_000
"""Maximum size of all words in bytes: the kernel allows a quarter of the stack limit, usually 8 MB."""


def check_words(argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
    """Raise ToolError, with the problem and the word, if no program can be started with these arguments."""
    if isinstance(argv, str) or not argv:
        raise ToolError("a command is a list of words and needs at least the program's name; the list is empty")
    if not argv[0]:
        raise ToolError("the first word of a command is the program's name; it is empty")
    n_bytes = 0
    for what, word in _words(argv, env, cwd):
        n_bytes += _size(what, word) + 1
    if n_bytes > ALL_WORDS:
        raise ToolError(f"a command takes {ALL_WORDS} bytes of words at most, not {n_bytes}: use a file or the input")


def _words(argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> Iterator[tuple[str, str]]:
    yield from ((f"word {number} of the command", word) for number, word in enumerate(argv))
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ToolError(f"{name!r:.60} is not a valid name of a variable")
        yield f"the variable {name!r:.60}", f"{name}={value}" if isinstance(value, str) else value
    if cwd is not None:
        yield "the working folder", cwd


def _size(what: str, word: str) -> int:
    if not isinstance(word, str):
        raise ToolError(f"{what} must be text, not {type(word).__name__}")
    if "\0" in word:
        raise ToolError(f"{what} contains a NUL, which ends a word")
    try:
        n_bytes = len(word.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as error:
        raise ToolError(f"{what} contains {word[error.start]!a}, half of a surrogate pair") from None
    if n_bytes > MAX_WORD:
        raise ToolError(f"{what} has {n_bytes} bytes; a program takes {MAX_WORD}: use a file or the input")
    return n_bytes
