"""The ids that an administrator has reserved for a user, parsed from /etc/subuid and /etc/subgid."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.sandboxes.lifecycle.user_ids import subordinate


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("other:1:2\nme:100000:65536\nme:9:9\n", range(100000, 165536)),
        ("1234:500:10", range(500, 510)),
        ("me:0:65536\nme:x\n\n#\nme:7:1", range(7, 8)),
        ("me2:1:2\n", range(0)),
        ("me:5:0", range(5, 5)),
        ("", range(0)),
    ],
)
def test_subordinate_ids_are_parsed(text: str, found: range, tmp_path: Path) -> None:
    users, groups = tmp_path / "subuid", tmp_path / "subgid"
    users.write_text(text)
    assert not subordinate([users, groups], "me", 1234), "groups have no ids"
    groups.write_text(text)
    assert list(subordinate([users, groups], "me", 1234)) == list(found)
    groups.write_text("me:501:65536")
    assert set(subordinate([users, groups], "me", 1234)) == set(found) & set(range(501, 66037))
