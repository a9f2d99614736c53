"""A lent shell waits for texts: wherever they are split, for the first of several, and up to its time limit."""

from __future__ import annotations

import asyncio

import pytest

from farm.errors import Conflict
from farm.records.lending.sandbox_calls import ShellCall, ShellOutput
from workers.lending.lent_shell import LentShell
from workers.plugins.interfaces import ShellResult


class TalkingProgram:
    """A shell whose program writes these pieces, one per read, and then ends, or runs on silently."""

    def __init__(self, *pieces: str, ends: bool = False) -> None:
        self.pieces = list(pieces)
        self.ends = ends
        self.typed = b""

    async def run(self, command: str, timeout_s: float, *, interactive: bool = False) -> ShellResult:
        return await self.send(b"", timeout_s)

    async def send(self, keys: bytes, wait_s: float) -> ShellResult:
        await asyncio.sleep(0)
        self.typed += keys
        if self.pieces:
            return ShellResult(None, self.pieces.pop(0), "/", running=True)
        if self.ends:
            return ShellResult(0, "", "/")
        await asyncio.sleep(min(wait_s, 0.01))
        return ShellResult(None, "", "/", running=True)

    async def close(self) -> None: ...


def begun(program: TalkingProgram, expect: list[str] | None, timeout_s: float = 60) -> tuple[LentShell, ShellOutput]:
    shell = LentShell(program)
    call = ShellCall(command="x", interactive=True, expect=expect, timeout_s=timeout_s)
    return shell, asyncio.run(shell.answer(call))


@pytest.mark.parametrize(
    ("pieces", "expect", "output", "expected"),
    [
        (("a>>> ",), [">>> "], "a>>> ", ">>> "),
        (("a>", ">", "> ", "b"), [">>> "], "a>>> ", ">>> "),
        (("one two",), ["two", "one"], "one", "one"),
        (("one",), ["one", "on"], "one", "one"),
        (("o", "n", "e"), ["one", "zzzzzzzz"], "one", "one"),
        (("é", "é!"), ["é!"], "éé!", "é!"),
        (("ab",), ["b", "ab"], "ab", "ab"),
    ],
)
def test_output_ends_with_the_first_expected_text(
    pieces: tuple[str, ...], expect: list[str], output: str, expected: str
) -> None:
    _, shown = begun(TalkingProgram(*pieces), expect)
    assert (shown.output, shown.expected, shown.running) == (output, expected, True)


def test_output_after_an_expected_text_is_kept_for_the_next_call() -> None:
    program = TalkingProgram("a>b", "c>")
    shell, first = begun(program, [">"])
    assert first.output == "a>"
    second = asyncio.run(shell.answer(ShellCall(keys="k", expect=[">"])))
    assert (second.output, second.expected, program.typed) == ("bc>", ">", b"k")


def test_output_after_an_expected_text_is_in_a_call_without_texts() -> None:
    shell, _ = begun(TalkingProgram("a>b", "c"), [">"])
    assert asyncio.run(shell.answer(ShellCall(keys=""))).output == "bc"


def test_program_that_ends_or_times_out_has_no_expected_text() -> None:
    _, ended = begun(TalkingProgram("a", ends=True), [">"])
    assert (ended.output, ended.expected, ended.running, ended.code) == ("a", None, False, 0)
    _, slow = begun(TalkingProgram("a"), [">"], timeout_s=0.05)
    assert (slow.output, slow.expected, slow.running) == ("a", None, True)
    _, waits = begun(TalkingProgram("a"), None)
    assert (waits.output, waits.running) == ("a", True)


def test_empty_list_waits_for_the_end() -> None:
    _, ended = begun(TalkingProgram("a", "b", ends=True), [])
    assert (ended.output, ended.running) == ("ab", False)


def test_long_output_keeps_its_head_and_its_tail() -> None:
    _, shown = begun(TalkingProgram(*["x" * 100_000] * 5, "end>"), ["end>"])
    assert shown.output.startswith("xxx")
    assert shown.output.endswith("end>")
    assert len(shown.output) < 210_000
    assert shown.n_dropped == 500_004 - 200_000


def test_keys_without_a_program_are_a_conflict() -> None:
    shell = LentShell(TalkingProgram(ends=True))
    with pytest.raises(Conflict, match="no interactive program"):
        asyncio.run(shell.answer(ShellCall(keys="x")))
    shell, _ = begun(TalkingProgram(ends=True), [])
    with pytest.raises(Conflict, match="no interactive program"):
        asyncio.run(shell.answer(ShellCall(keys="x")))
