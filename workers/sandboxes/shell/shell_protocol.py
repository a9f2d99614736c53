"""The lines typed to a shell, and the records that it returns.

Commands and records use one socket, so the kernel identifies the writer of each record. Records of other processes are
ignored, even if they got the descriptor. They can hardly get it: while a command runs, the descriptors below are
/dev/null, and programs do not inherit the copies that bash keeps. Only code in the shell process itself can forge the
end of a command.

The driver relies on no state in the shell. The command's number and the previous exit code are literals in the typed
line; no variable contains them, so none can be unset, made read-only or read. The command itself is in PS2, which every
interactive shell has. After each command, the two variables that the next line assigns are unset; if that fails, the
shell exits and its driver starts another. A shell that reads its terminal again without having sent a record is also
replaced (`shell_session.ShellSession.lost`).

Descriptors 0, 1 and 2 are kept between commands, so `exec >file` persists as in any terminal. This happens only after
commands with a word that can change descriptors, because `set -x` then shows the redirections. The records of such
commands have a negative number. Until the first of them, nothing is kept, which saves three redirections per command.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

_FIRST = 230
_ROOM = 16
_READY = "r"

_SKIP = r" while IFS= \builtin read -r -d '' -u @S PS2 && [[ $PS2 != #NUMBER ]]; do :; done;"
_TAKE = r" IFS= \builtin read -r -d '' -u @S PS2;"
# bash reads a socket byte by byte, but a file in blocks
_TAKE_STORED = r" IFS= \builtin read -r -d '' -u @M PS2;"
_TELL_READY = rf""" \builtin printf '%d {_READY}\0' #NUMBER >&@S;"""
# the socket first, so that its copy gets the number @K, the first free one above @N
_HIDE = " @S<&@N @M<&@N"
_HIDE_REST = " @O<&@N @N<&@S"
_HIDE_KEPT = " @I<&@S @V<&@S @W<&@S"
_CODE = r" \__sandbox_code #CODE '' && \: '';"
_EVAL = r' \builtin eval "$PS2"'
_DONE = "; \\__sandbox_done #NUMBER && \\:\n"
_DONE_KEPT = _DONE.replace("#NUMBER", "#NUMBER kept")
_AS_STARTED = " <&@N >&@O 2>&@O"
_AS_KEPT = " <&@I >&@V 2>&@W"
_RUN = f"{_CODE}{_EVAL}{_HIDE}{_AS_STARTED}{_HIDE_REST}{_DONE}"
_RUN_AFTER_KEPT = f"{_CODE}{_EVAL}{_HIDE}{_AS_KEPT}{_HIDE_REST}{_HIDE_KEPT}{_DONE}"
# the eval and the function that keeps its descriptors form one group, to which the redirections apply
_KEEP = r"; \__sandbox_keep; }"
_RUN_KEPT = f"{_CODE} {{{_EVAL}{_KEEP}{_HIDE}{_AS_STARTED}{_HIDE_REST}{_DONE_KEPT}"
_RUN_KEPT_AGAIN = f"{_CODE} {{{_EVAL} @I<&@N @V<&@N @W<&@N{_KEEP}{_HIDE}{_AS_KEPT}{_HIDE_REST}{_DONE_KEPT}"
# bash's own input is the terminal
_RUN_TYPED = f"{_CODE}{_EVAL}{_HIDE} >&0 2>&0{_HIDE_REST}"
_DONE_TYPED = "; \\__sandbox_done #NUMBER typed && \\:\n"
_KEEPS = re.compile(rb"\b(?:exec|source)\b|(?:^|[\s;&|({])\.\s")


class Protocol:
    """All lines to type, with the descriptor numbers in the shell."""

    def __init__(self, first: int) -> None:
        # the lowest number, because bash saves descriptors during a command above the copied one
        self.stdin, self.stdout, self.stderr = range(first, first + 3)
        self.socket, self.output, self.memory, self.nothing, self._kept = range(first + 3, first + 8)
        boot = Path(__file__).with_name("shell_boot.sh").read_text()
        # line breaks become blanks, so the code contains no comments
        self.boot = f" {self._filled(boot).strip()}\n".replace("\n", " ").encode() + b"\n"
        self._lines = {kind: self._line(*kind) for kind in product((False, True), repeat=5)}

    def _filled(self, text: str) -> str:
        # in the order of `__init__`
        for number, name in enumerate("IVWSOMNK", self.stdin):
            text = text.replace(f"@{name}", str(number))
        return text

    def _line(self, stored: bool, typed: bool, skip: bool, keeps: bool, kept: bool) -> str:
        if typed:
            run = f"{_RUN_TYPED}{_HIDE_KEPT if kept else ''}{_DONE_TYPED}"
        elif keeps:
            run = _RUN_KEPT_AGAIN if kept else _RUN_KEPT
        else:
            run = _RUN_AFTER_KEPT if kept else _RUN
        parts = (
            f" PROMPT_COMMAND='__sandbox_done #NUMBER{' typed' if typed else ''}';",
            _SKIP if skip else "",
            _TELL_READY + _TAKE if typed else "",
            _TAKE_STORED if stored else _TAKE,
            run,
        )
        return self._filled("".join(parts))

    def line(self, number: int, code: int, *, stored: bool, typed: bool, skip: bool, keeps: bool, kept: bool) -> bytes:
        """Return the line to type for a command, which is read from the socket, or from the memory file if `stored`.

        `code` is the `$?` that the command sees. `typed` gives it the terminal after a record on the socket reports
        that the setup is done. `skip` skips data on the socket that an interrupted shell did not read, up to the
        command's number. `keeps` keeps the descriptors 0, 1 and 2 for later commands. `kept` must be true from the
        first record on that reports it.
        """
        line = self._lines[stored, typed, skip, keeps, kept]
        return line.replace("#NUMBER", str(number)).replace("#CODE", str(code)).encode()


def may_redirect(command: bytes) -> bool:
    """Return whether a command may change the shell's own descriptors: it contains `exec`, or sources a file."""
    return _KEEPS.search(command) is not None


@cache
def protocol(n_files: int) -> Protocol:
    """Return the protocol for a limit of open files. Uses high numbers, to avoid a user's `exec 3>file`."""
    return Protocol(min(_FIRST, n_files - _ROOM))


class CommandEnd(NamedTuple):
    """The end of a command. `alive` is False if the shell ended with it."""

    code: int | None
    cwd: str
    alive: bool = True
    exported: str = ""
    kept: bool = False
    """True if its descriptors 0, 1 and 2 are kept for the next command."""


def ready(record: bytes | bytearray, number: int) -> bool:
    """Return whether a record reports that the shell waits for the setup of the terminal."""
    return record == b"%d %s" % (number, _READY.encode())


def end(record: bytes | bytearray, number: int) -> CommandEnd | None:
    """Return the end of a command from its record; None if the record is of another command."""
    written_number, _, rest = record.decode("utf-8", "surrogateescape").partition(" ")
    code, _, cwd = rest.partition(" ")
    if written_number not in (str(number), str(-number)) or not code.isdecimal():
        return None
    return CommandEnd(int(code), cwd, kept=written_number.startswith("-"))


def death(records: bytes, code: int | None) -> CommandEnd:
    """Return the end of the shell itself from its last records, or only from its process's exit code."""
    last, _, exported = records.decode("utf-8", "surrogateescape").partition("\0")
    exit_code, _, cwd = last.removeprefix("X").partition(" ")
    if last.startswith("X") and exit_code.isdecimal():
        return CommandEnd(int(exit_code), cwd, alive=False, exported=exported.rstrip("\0"))
    return CommandEnd(code if code is None or code >= 0 else 128 - code, "", alive=False)
