"""Names in shared libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.sandboxes.isolation.restoring.image_contents import soname


def test_soname_of_the_c_library_is_read_from_a_file_of_any_name(tmp_path: Path) -> None:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    library = next((path for path in mapped if path.endswith("/libc.so.6")), "")
    if not library:
        pytest.skip("this machine has another C library than glibc")
    other = tmp_path / "libother.so"
    other.write_bytes(Path(library).read_bytes())
    assert soname(str(other)) == "libc.so.6"


def test_file_that_is_not_a_library_has_no_name(tmp_path: Path) -> None:
    text = tmp_path / "script.so"
    text.write_text("INPUT(libc.so.6)")
    assert soname(str(text)) == ""


def test_broken_library_has_an_unknown_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF" + b"\xff" * 100)
    assert soname(str(broken)) is None
    assert soname(str(tmp_path / "absent.so")) is None
