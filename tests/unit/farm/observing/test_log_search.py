"""Lines about an id, from text and JSON logs in several files: sorted by time, with their tracebacks."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from farm.cli.batches import logs
from farm.observing.process_log import lines_about

ROLLOUT = "b0123456789.3.1"


def at(second: int) -> str:
    return datetime.fromtimestamp(1_800_000_000 + second).strftime("%Y-%m-%d %H:%M:%S,000")


def json_at(second: int, **fields: str) -> str:
    return json.dumps({"at": datetime.fromtimestamp(1_800_000_000 + second, UTC).isoformat(), **fields})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node-1").mkdir()
    (tmp_path / "node-1" / "run.log").write_text(
        f"not the farm's {ROLLOUT}\n"
        f"{at(3)} ERROR n1/run x: it broke [rollout_id={ROLLOUT} attempt=1]\nTraceback\n  {ROLLOUT}.py\nValueError\n"
        f"{at(4)} INFO n1/run x: another [rollout_id=b0123456789.3.11]\n  its traceback\n"
        f"{at(9)} INFO n1/run x: {ROLLOUT}: without an end"
    )
    (tmp_path / "eval.err").write_text(
        f"{json_at(1, rollout_id=ROLLOUT, message='first')}\n{json_at(5, batch_id='b0123456789', message='batch')}\n"
        f"{{no JSON {ROLLOUT}\n{json_at(6, rollout_id='b9876543210.0.0', message='none')}\n"
    )
    (tmp_path / "data.bin").write_text(f"{at(2)} {ROLLOUT}\n")
    (tmp_path / "broken.log").symlink_to(tmp_path / "nowhere")
    return tmp_path


def test_lines_of_all_files_are_sorted_by_time_with_their_tracebacks(folder: Path) -> None:
    first, broke, last = lines_about(ROLLOUT, [folder, folder / "node-1"])
    assert json.loads(first.text)["message"] == "first"
    assert broke.text.splitlines()[1:] == ["Traceback", f"  {ROLLOUT}.py", "ValueError"]
    assert last.text.endswith("without an end")
    assert (first.at, broke.at, last.at) == (1_800_000_001, 1_800_000_003, 1_800_000_009)


@pytest.mark.parametrize(("ref", "n"), [("b0123456789", 5), ("b0123456789.3", 4), ("b0123456789.3.11", 1), ("b1", 0)])
def test_batch_includes_the_lines_of_its_rollouts(folder: Path, ref: str, n: int) -> None:
    assert len(lines_about(ref, [folder])) == n


def test_command_prints_lines_or_the_searched_folders(folder: Path) -> None:
    result = CliRunner().invoke(logs, [ROLLOUT, "--in", str(folder)])
    assert (result.exit_code, len(result.output.splitlines())) == (0, 6)
    for ref, fault in (("b0123456780.0.0", f"no log in {folder} has a line about"), ("b.x", "there is no batch")):
        result = CliRunner().invoke(logs, [ref, "--in", str(folder)])
        assert result.exit_code == 1
        assert fault in result.output
