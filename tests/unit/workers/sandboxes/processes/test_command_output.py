"""The shown and the stored parts of a command's output."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.sandboxes.processes.command_output import CommandOutput


def test_short_output_is_shown_and_uses_no_disk(tmp_path: Path) -> None:
    output = CommandOutput(tmp_path / "none", 10, 100)
    output.add(b"0123456789")
    assert (output.data(), output.full(), output.n_dropped) == (b"0123456789", None, 0)
    assert not (tmp_path / "none").exists()


def test_long_output_is_stored_in_addition(tmp_path: Path) -> None:
    output = CommandOutput(tmp_path, 4, 100)
    for chunk in (b"ab", b"cde", b"f"):
        output.add(chunk)
    assert output.data() == b"ab\n[... 2 bytes left out ...]\nef"
    assert output.full() == b"abcdef"
    output.close()
    output.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(chunks=st.lists(st.binary(max_size=40)), shown=st.integers(2, 20), kept=st.integers(2, 60))
def test_result_does_not_depend_on_the_chunks(chunks: list[bytes], shown: int, kept: int, tmp_path: Path) -> None:
    output = CommandOutput(tmp_path, shown, kept)
    for chunk in chunks:
        output.add(chunk)
    whole = b"".join(chunks)
    full = output.full()
    output.close()
    if len(whole) <= shown // 2 * 2:
        assert (output.data(), full) == (whole, None)
        return
    room = kept // 2
    n_dropped = len(whole) - 2 * room
    if n_dropped <= 0:
        assert full == whole
    else:
        assert full == whole[:room] + b"\n[... %d bytes left out ...]\n" % n_dropped + whole[-room:]


def test_no_file_is_left_in_the_folder(tmp_path: Path) -> None:
    output = CommandOutput(tmp_path, 4, 100)
    output.add(b"x" * 50)
    assert list(tmp_path.iterdir()) == [], "not even while it is written"
    output.close()


def test_full_disk_loses_only_the_stored_output(tmp_path: Path) -> None:
    place = tmp_path / "no-folder"
    place.write_text("")
    output = CommandOutput(place, 4, 100)
    output.add(b"abcdef")
    output.add(b"g")
    assert (output.data(), output.full(), output.n_dropped) == (b"ab\n[... 3 bytes left out ...]\nfg", None, 3)


def n_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_descriptors_are_closed(tmp_path: Path) -> None:
    before = n_open()
    for _ in range(20):
        output = CommandOutput(tmp_path, 4, 100)
        output.add(b"x" * 50)
        output.full()
        output.close()
    assert n_open() == before
