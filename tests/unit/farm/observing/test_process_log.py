"""JSON lines of a process's log: the ids that they are about, a traceback in one line, no secret in any form."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from farm.ids import first_ref
from farm.observing.process_log import JsonLines, TextLines, log_about, log_also
from workers.process.loop import Loop
from workers.stages.redaction import SecretsInUse

SECRET = 'a "quoted" secret\nof two lines'
ROLLOUT = "b0123456789.3.1"


def line(message: str, *args: Any, error: BaseException | None = None) -> dict[str, Any]:
    """Return the line of a record, which is one line whatever it contains."""
    secrets = SecretsInUse()
    secrets.add(SECRET)
    record = logging.makeLogRecord({"name": "farm.any", "levelname": "ERROR", "msg": message, "args": args})
    record.exc_info = (type(error), error, error.__traceback__) if error is not None else None
    written = JsonLines({"node": "n1", "process": "run"}, secrets.redacted).format(record)
    assert "\n" not in written
    result: dict[str, Any] = json.loads(written)
    return result


def test_line_has_the_ids_that_it_is_about() -> None:
    with log_about(ROLLOUT, attempt=2, stage="run"):
        inside = line("the tool did not close")
    assert {name: inside[name] for name in ("node", "process", "batch_id", "rollout_id", "attempt", "stage")} == {
        **{"node": "n1", "process": "run", "batch_id": "b0123456789", "rollout_id": ROLLOUT},
        **{"attempt": 2, "stage": "run"},
    }
    named = line("%s: its policy has broken its sandbox", ROLLOUT)
    assert (named["batch_id"], named["rollout_id"]) == ("b0123456789", ROLLOUT)
    named = line("batch %s hangs", "b0123456789")
    assert (named["batch_id"], "rollout_id" in named) == ("b0123456789", False)
    assert not {"batch_id", "rollout_id"} & set(line("the node is ready"))


def test_text_line_has_ids_before_its_traceback() -> None:
    try:
        raise ValueError(f"refused: {SECRET}")
    except ValueError as error:
        exc_info = (type(error), error, error.__traceback__)
    secrets = SecretsInUse()
    secrets.add(SECRET)
    record = logging.LogRecord("farm.any", logging.ERROR, "", 0, "the tool did not close", (), exc_info)
    with log_about(ROLLOUT, attempt=2, stage="run", engine=f"http://{SECRET}@host"):
        first, *trace = TextLines("n1/run", secrets.redacted).format(record).splitlines()
    about = f"[rollout_id={ROLLOUT} attempt=2 stage=run engine=http://[secret]@host]"
    assert first.endswith(f"ERROR n1/run farm.any: the tool did not close {about}")
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", "ValueError: refused: [secret]")


def test_field_added_in_a_block_is_only_in_later_lines_of_the_block() -> None:
    async def picks() -> None:
        log_also(engine="http://one")

    loop = Loop()
    try:
        with log_about(ROLLOUT):
            assert "engine" not in line("begins")
            loop.run(picks())
            assert line("ends")["engine"] == "http://one"
        log_also(engine="http://two")
        assert "engine" not in line("another")
    finally:
        loop.close()


def test_coroutine_of_a_stage_logs_its_ids_and_later_ones_do_not() -> None:
    async def logs() -> dict[str, Any]:
        return line("from a task")

    loop = Loop()
    try:
        with log_about(ROLLOUT):
            assert loop.run(logs())["rollout_id"] == ROLLOUT
        assert "rollout_id" not in loop.run(logs())
    finally:
        loop.close()


def test_no_form_of_a_secret_is_in_a_line() -> None:
    try:
        raise ValueError(f"refused: {SECRET}")
    except ValueError as error:
        written = line("key %s at postgres://farm:hunter22@db/farm", SECRET, error=error)
    assert written["message"] == "key [secret] at postgres://farm:***@db/farm"
    assert written["exception"].startswith("Traceback")
    assert written["exception"].endswith("ValueError: refused: [secret]")


def test_record_that_cannot_be_formatted_is_still_a_line() -> None:
    assert line("%s of %s", "one")["message"] == "'%s of %s' ('one',)"
    record = logging.makeLogRecord({"name": "x", "levelname": "ERROR", "msg": "100 %s", "args": ("words",)})
    assert TextLines("n%1/run", str.upper).format(record).endswith("ERROR N%1/RUN X: 100 WORDS")


UNCAUGHT = """
import sys, threading
from farm.observing import process_log
from farm.settings import settings
process_log.set_up(settings(), "api")
def broken(): raise ValueError("refused: " + settings().webhook_secret)
thread = threading.Thread(target=broken, name="sender")
thread.start()
thread.join()
import warnings; warnings.warn("b0123456789.0.1 is old")
broken()
"""


def test_uncaught_exceptions_and_warnings_are_lines() -> None:
    env = {"FARM_LOG": "json", "FARM_NODE": "n7", "FARM_WEBHOOK_SECRET": "hunter22hunter"}
    ended = subprocess.run([sys.executable, "-c", UNCAUGHT], env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 1
    in_thread, warning, last = map(json.loads, ended.stderr.splitlines())
    assert in_thread["message"] == "Uncaught ValueError in thread sender"
    assert warning["rollout_id"] == "b0123456789.0.1"
    assert last["exception"].splitlines()[-1] == "ValueError: refused: [secret]"
    assert (last["node"], last["process"], last["level"]) == ("n7", "api", "CRITICAL")
    assert "hunter22" not in ended.stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("group b0123456789.3 is in quarantine", "b0123456789.3"),
        ("(b0123456789.3.1, attempt 2)", ROLLOUT),
        ("sandbox b0123456789.3.1.2.eval", ROLLOUT),
        ("end of b0123456789.", "b0123456789"),
        ("ab0123456789 b01234567890 b012345678 x.b0123456789", None),
    ],
)
def test_id_in_a_text_is_found(text: str, found: str | None) -> None:
    ref = first_ref(text)
    assert (None if ref is None else str(ref)) == found
