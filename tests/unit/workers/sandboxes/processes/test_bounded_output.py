"""The head and the tail of a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.sandboxes.processes.command_output import HeadTail


def test_omitted_middle_is_counted() -> None:
    kept = HeadTail(4)
    kept.add(b"abcdef")
    assert kept.text() == "ab\n[... 2 bytes left out ...]\nef"
    assert kept.n_dropped == 2


@given(st.lists(st.text("abcdefgh").map(str.encode)), st.integers(2, 50))
def test_result_does_not_depend_on_the_chunks(chunks: list[bytes], limit: int) -> None:
    kept = HeadTail(limit)
    for chunk in chunks:
        kept.add(chunk)
    whole = b"".join(chunks).decode()
    if kept.n_dropped == 0:
        assert kept.text() == whole
    else:
        head, tail = kept.text().split(f"\n[... {kept.n_dropped} bytes left out ...]\n")
        assert whole.startswith(head)
        assert whole.endswith(tail)
        assert len(head) + len(tail) + kept.n_dropped == len(whole)
        assert len(head) + len(tail) <= limit


def test_character_cut_in_two_is_replaced() -> None:
    kept = HeadTail(2)
    kept.add("éa".encode())
    assert "\ufffd" in kept.text()
