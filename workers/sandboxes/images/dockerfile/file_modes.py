"""Modes of files in `COPY --chmod`: in digits, or in letters as for `chmod` (`u=rwX,go=rX`)."""

from __future__ import annotations

import re
from typing import TypeAlias

FileMode: TypeAlias = int | str
"""Digits as a number, letters as written."""

_CLAUSE = re.compile(r"([ugoa]*)((?:[-+=](?:[rwxXst]*|[ugo]))+)")
_CHANGE = re.compile(r"([-+=])([rwxXst]+|[ugo]|)")
_SHIFTS = {"u": 6, "g": 3, "o": 0}
_BITS = {"r": 4, "w": 2, "x": 1}


def file_mode(written: str) -> FileMode:
    """Return the parsed mode. Raises ValueError if it is invalid."""
    if re.fullmatch(r"[0-7]{1,4}", written):
        return int(written, 8)
    if written[:1].isdigit() or not all(_CLAUSE.fullmatch(clause) for clause in written.split(",")):
        raise ValueError(f"--chmod={written}: it is a mode in digits, such as 755, or in letters, such as u=rwX,go=rX")
    return written


def applied(mode: FileMode | None, own: int, *, is_folder: bool) -> int:
    """Return the new permissions of a file with the permissions `own`; these stay if `mode` is None."""
    if not isinstance(mode, str):
        return own if mode is None else mode
    result = own
    for clause in mode.split(","):
        match = _CLAUSE.fullmatch(clause)
        assert match
        who = "ugo" if "a" in match[1] or not match[1] else match[1]
        for sign, letters in _CHANGE.findall(match[2]):
            result = _changed(result, who, sign, letters, is_folder)
    return result


def _changed(mode: int, who: str, sign: str, letters: str, is_folder: bool) -> int:
    wanted = cleared = 0
    for each in who:
        bits = sum({_BITS.get(letter, 0) for letter in letters})
        if letters in _SHIFTS and letters:
            bits = mode >> _SHIFTS[letters] & 7
        if "X" in letters and (is_folder or mode & 0o111):
            bits |= 1
        wanted |= bits << _SHIFTS[each]
        cleared |= 7 << _SHIFTS[each]
        if each in "ug":
            special = 0o4000 if each == "u" else 0o2000
            wanted |= special if "s" in letters else 0
            cleared |= special
    if "t" in letters:
        wanted |= 0o1000
    if sign == "-":
        return mode & ~wanted
    return (mode & ~cleared if sign == "=" else mode) | wanted
