"""What a shell's driver and its bash say to each other: lines that are typed, records that come back.

Commands go in and records come out on one socket, so that the kernel names the writer of each: what another process
writes, however it came by the descriptor, counts for nothing. And it hardly comes by it: while a command is evaluated,
the numbers below are /dev/null, and the copies that bash keeps are not inherited by programs. What can still end a
command by a record of its own is code that runs in the shell itself, since that is the shell.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

_FIRST = 230
_ROOM = 16
_READY = "r"

_BOOT = r"""
unset HISTFILE; set +o history; history -c; PS0= PS1= PS2= PS4='+ ';
__sandbox_done() { __sandbox_last=$?; if [[ -n ${__sandbox_busy-} ]]; then
builtin printf '%d %d %s\0' "$__sandbox_busy" "$__sandbox_last" "$PWD" >&@S || builtin exit "$__sandbox_last";
__sandbox_busy=;
if [[ -n ${__sandbox_typed-} ]]; then __sandbox_typed=; IFS= builtin read -r -d '' -u @S __sandbox_command; fi;
fi; PS0= PS1= PS2=; return "$__sandbox_last"; };
__sandbox_code() { return "${__sandbox_last:-0}"; };
__sandbox_exit() { builtin printf 'X%d %s\0' "$1" "$PWD" >&"$2" && { declare -px; builtin printf '\0'; } >&"$2"; };
trap '__sandbox_last=$?; for __sandbox_command in @K @S; do
__sandbox_exit "$__sandbox_last" "$__sandbox_command" 2>/dev/null && break; done' EXIT;
__sandbox_busy=1; __sandbox_done
"""
_SKIP = (
    r" while IFS= \builtin read -r -d '' -u @S __sandbox_command &&"
    ' [[ $__sandbox_command != "$__sandbox_busy" ]]; do :; done;'
)
_TAKE = r" IFS= \builtin read -r -d '' -u @S __sandbox_command;"
# bash reads a socket one byte at a time, a file in blocks
_TAKE_STORED = r" IFS= \builtin read -r -d '' -u @M __sandbox_command;"
_TELL_READY = rf""" __sandbox_typed=1; \builtin printf '%d {_READY}\0' "$__sandbox_busy" >&@S;"""
# the socket first, as its copy then gets the number @K, the first that is free above @N
_EVAL = r' __sandbox_code && :; \builtin eval "$__sandbox_command" @S<&@N @M<&@N'
_END = " @O<&@N @N<&@S; __sandbox_done && :\n"
_RUN = f"{_EVAL} <&@N >&@O 2>&@O{_END}"
# bash's own input is the terminal
_RUN_TYPED = f"{_EVAL} >&0 2>&0{_END}"


class Protocol:
    """Everything that is typed, with the numbers that the descriptors have in the shell."""

    def __init__(self, first: int) -> None:
        self.socket, self.output, self.memory, self.nothing, self._kept = range(first, first + 5)
        self.boot = f" {self._filled(_BOOT).strip()}\n".replace("\n", " ").encode() + b"\n"
        kinds = [(stored, typed, skip) for stored in (False, True) for typed in (False, True) for skip in (False, True)]
        self._lines = {kind: self._line(*kind) for kind in kinds}

    def _filled(self, text: str) -> str:
        for name, number in zip(
            "SOMNK", (self.socket, self.output, self.memory, self.nothing, self._kept), strict=True
        ):
            text = text.replace(f"@{name}", str(number))
        return text

    def _line(self, stored: bool, typed: bool, skip: bool) -> bytes:
        parts = (
            " __sandbox_busy=%d PROMPT_COMMAND=__sandbox_done;",
            (_SKIP if skip else "") + (_TELL_READY + _TAKE if typed else "") + (_TAKE_STORED if stored else _TAKE),
            _RUN_TYPED if typed else _RUN,
        )
        start, *rest = map(self._filled, parts)
        return start.encode() + "".join(rest).replace("%", "%%").encode()

    def line(self, number: int, *, stored: bool, typed: bool, skip: bool) -> bytes:
        """What is typed to run a command, which is taken from the socket, or if `stored` from the memory file.

        `typed` gives it the terminal, once a record on the socket says that this is set up. `skip` passes over what an
        interrupted shell may not have taken from the socket, up to the command's number.
        """
        return self._lines[stored, typed, skip] % number


@cache
def protocol(n_files: int) -> Protocol:
    """For a shell that may have so many open files: high numbers, which a user's own `exec 3>file` does not meet."""
    return Protocol(min(_FIRST, n_files - _ROOM))


class Ended(NamedTuple):
    """What is known of a command's end; `alive` is False if the shell ended with it."""

    code: int | None
    cwd: str
    alive: bool = True
    exported: str = ""


def ready(record: bytes | bytearray, number: int) -> bool:
    """Whether it says that the shell waits for the terminal to be set up."""
    return record == b"%d %s" % (number, _READY.encode())


def end(record: bytes | bytearray, number: int) -> Ended | None:
    """The end of a command that it tells of; None if it is not about this one."""
    about, _, rest = record.decode("utf-8", "surrogateescape").partition(" ")
    code, _, cwd = rest.partition(" ")
    return Ended(int(code), cwd) if about == str(number) and code.isdecimal() else None


def death(records: bytes, code: int | None) -> Ended:
    """How the shell itself ended, by its last records, or by the exit code of its process alone."""
    last, _, exported = records.decode("utf-8", "surrogateescape").partition("\0")
    told, _, cwd = last.removeprefix("X").partition(" ")
    if last.startswith("X") and told.isdecimal():
        return Ended(int(told), cwd, alive=False, exported=exported.rstrip("\0"))
    return Ended(code if code is None or code >= 0 else 128 - code, "", alive=False)
