"""Logging of the farm's processes: one line per event, with the ids that it is about, as text or as JSON objects.

In JSON a traceback is part of its event's line. Secrets of the farm are redacted from all messages. Log files of
several nodes in a shared folder are searched together, merged by time.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farm.configuration.secret_values import secret_variables, without_credentials
from farm.ids import RolloutRef, first_ref
from farm.settings import Settings, settings

_LEAST_CHARS = 6
_TEXT_TIME = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
_SUFFIXES = (".log", ".out", ".err")


@dataclass(slots=True)
class _About:
    """The fields of the log lines of a block. The mapping is replaced, never changed, as other threads read it."""

    fields: Mapping[str, object]


_ABOUT: ContextVar[_About | None] = ContextVar("log_about", default=None)


@contextmanager
def log_about(rollout_id: str, **more: object) -> Iterator[None]:
    """Add a rollout's id to lines that are logged in the block, and in tasks that it starts."""
    token = _ABOUT.set(_About({**ids_of(RolloutRef.of(rollout_id)), **more}))
    try:
        yield
    finally:
        _ABOUT.reset(token)


def log_also(**more: object) -> None:
    """Add fields to all later lines of the enclosing block of `log_about`; without one it does nothing."""
    about = _ABOUT.get()
    if about is not None:
        about.fields = {**about.fields, **more}


def _fields() -> Mapping[str, object]:
    about = _ABOUT.get()
    return about.fields if about is not None else {}


def ids_of(ref: RolloutRef) -> dict[str, object]:
    """Return the id fields of a line about a batch or one of its rollouts."""
    ids: dict[str, object] = {"batch_id": ref.batch_id}
    return ids | {"rollout_id": str(ref)} if ref.kind == "rollout" else ids


class JsonLines(logging.Formatter):
    """JSON objects, one per line. `known` are fields of every line."""

    def __init__(self, known: Mapping[str, object], redacted: Callable[[str], str]) -> None:
        super().__init__()
        self._known = known
        self._redacted = redacted

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        message = _message(record)
        about = _fields()
        if not about and (ref := first_ref(message)) is not None:
            about = ids_of(ref)
        line: dict[str, Any] = {"at": at, "level": record.levelname, **self._known}
        line |= {name: self._redacted(each) if isinstance(each, str) else each for name, each in about.items()}
        line["logger"] = record.name
        # before JSON escapes characters
        line["message"] = self._redacted(message)
        if record.exc_info:
            line["exception"] = self._redacted(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = self._redacted(record.stack_info)
        return json.dumps(line)


class TextLines(logging.Formatter):
    """Plain lines, with the same fields in brackets at the end. The batch is left out: rollout ids contain it."""

    def __init__(self, where: str, redacted: Callable[[str], str]) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {where.replace('%', '%%')} %(name)s: %(message)s")
        self._redacted = redacted

    def format(self, record: logging.LogRecord) -> str:
        return self._redacted(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name in the standard library
        fields = {name: each for name, each in _fields().items() if name != "batch_id"}
        about = " ".join(f"{name}={each}" for name, each in fields.items())
        return super().formatMessage(record) + (f" [{about}]" if about else "")


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:
        # a message of a library whose arguments do not match is logged, too
        return f"{record.msg!r} {record.args!r}"


def own_redacted(text: str) -> str:
    """Return a text without the secrets of this process's settings and environment variables."""
    secrets = {*settings().secrets, *secret_variables(os.environ)}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST_CHARS:
            text = text.replace(secret, "[secret]")
    return without_credentials(text)


def set_up(options: Settings, process: str, where: str = "", redacted: Callable[[str], str] = own_redacted) -> None:
    """Log to standard error from now on, level warning and above."""
    handler = logging.StreamHandler()
    if options.log == "json":
        handler.setFormatter(JsonLines({"node": options.node, "process": process}, redacted))
        _log_what_nobody_caught()
    else:
        handler.setFormatter(TextLines(where or f"{options.node}/{process}", redacted))
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def _log_what_nobody_caught() -> None:
    """Log uncaught exceptions of the process and of its threads as events."""
    log = logging.getLogger(__name__)

    def ended(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            return
        log.critical("Uncaught %s", kind.__name__, exc_info=(kind, error, trace))

    def thread_ended(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            name = args.thread.name if args.thread is not None else "a thread"
            exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
            log.critical("Uncaught %s in thread %s", args.exc_type.__name__, name, exc_info=exc_info)

    sys.excepthook = ended
    threading.excepthook = thread_ended


@dataclass(frozen=True, slots=True)
class LoggedLine:
    """An event of a log, with its traceback. `at` is in seconds since 1970, `path` is the file."""

    at: float
    path: Path
    text: str


def lines_about(ref: str, folders: Sequence[Path]) -> list[LoggedLine]:
    """Return the log lines about an id, by time. Unreadable files are skipped."""
    wanted = re.compile(rb"(?<![\w.-])" + re.escape(ref.encode()) + rb"(?!\w)")
    files = sorted({path for folder in folders for path in folder.rglob("*") if path.suffix in _SUFFIXES})
    lines = [line for path in files for line in _lines_of(path, ref.encode(), wanted)]
    return sorted(lines, key=lambda line: line.at)


def _lines_of(path: Path, ref: bytes, wanted: re.Pattern[bytes]) -> Iterator[LoggedLine]:
    at, event = 0.0, b""
    try:
        with path.open("rb") as lines:
            for line in lines:
                began = _time(line)
                if began is None:
                    # a continuation line of the previous event
                    event += line if event else b""
                    continue
                if event:
                    yield LoggedLine(at, path, event.decode("utf-8", "replace").rstrip("\n"))
                at, event = began, line if ref in line and wanted.search(line) else b""
    except OSError:
        pass
    if event:
        yield LoggedLine(at, path, event.decode("utf-8", "replace").rstrip("\n"))


def _time(line: bytes) -> float | None:
    """Return the time of a line that begins an event; None if it does not."""
    try:
        if line.startswith(b"{"):
            return datetime.fromisoformat(json.loads(line)["at"]).timestamp()
        if _TEXT_TIME.match(line):
            return datetime.strptime(line[:23].decode(), "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
    except (ValueError, KeyError, TypeError):
        pass
    return None
