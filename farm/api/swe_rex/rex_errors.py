"""Errors of SWE-ReX's runtime: status 511 with the class that its client raises, and a text."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from farm.client import serialization

_STATUS = 511
_OWN = "swerex.exceptions."
PLAIN = f"{_OWN}SwerexException"
NO_SESSION = f"{_OWN}SessionDoesNotExistError"
SESSION_EXISTS = f"{_OWN}SessionExistsError"
TIMED_OUT = f"{_OWN}CommandTimeoutError"
NON_ZERO = f"{_OWN}NonZeroExitCodeError"
NO_CODE = f"{_OWN}NoExitCodeError"
BAD_SYNTAX = f"{_OWN}BashIncorrectSyntaxError"
BAD_ZIP = "zipfile.BadZipFile"
_BY_WORDS = {
    os.strerror(number): f"builtins.{name}"
    for number, name in (
        (errno.ENOENT, "FileNotFoundError"),
        (errno.EISDIR, "IsADirectoryError"),
        (errno.ENOTDIR, "NotADirectoryError"),
        (errno.EEXIST, "FileExistsError"),
        (errno.EACCES, "PermissionError"),
        (errno.EPERM, "PermissionError"),
    )
}


class RexError(Exception):
    """An error that the client raises again, as the class of this path."""

    def __init__(self, class_path: str, message: str, extra_info: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.class_path = class_path
        self.extra_info = dict(extra_info or {})

    def response(self) -> Response:
        """Return its response."""
        about = {
            "message": str(self),
            "class_path": self.class_path,
            "traceback": "",
            "extra_info": self.extra_info,
        }
        return Response(serialization.written({"swerexception": about}), _STATUS, media_type="application/json")


def raised(error: Exception) -> RexError:
    """Convert a Python exception to the error that the client raises."""
    kind = type(error)
    return RexError(f"{kind.__module__}.{kind.__name__}", str(error))


def file_error(message: str) -> RexError:
    """Return the error about a file as the Python exception for the kernel's text, with which the message ends."""
    return RexError(_BY_WORDS.get(message.rpartition(": ")[2], PLAIN), message)
