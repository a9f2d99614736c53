"""The `edit` tool on files in memory: every byte outside of the edit is unchanged."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from farm.errors import ToolError
from workers.plugins.interfaces import ExecResult, Tool
from workers.testing import FakeSandbox
from workers.tools.edit import EditTool
from workers.tools.edit.files import MAX_SHOWN_CHARS, Change, History, digest, explained, listed, numbered

PATH = "/workspace/a.txt"


class Disk(FakeSandbox):
    """Words its errors like the sandboxes, removes files, and can be full."""

    def __init__(self, data: bytes | None = None) -> None:
        super().__init__(commands=self._remove)
        self.n_free: int | None = None
        if data is not None:
            self.files[PATH] = data

    async def read_file(self, path: str) -> bytes:
        name = "/" + posixpath.normpath(path).lstrip("/")
        if any(known.startswith(f"{name}/") for known in self.files):
            raise ToolError(f"{path}: Is a directory")
        if name not in self.files:
            raise ToolError(f"{path}: No such file or directory")
        return self.files[name]

    async def write_file(self, path: str, data: bytes) -> None:
        self.files["/" + posixpath.normpath(path).lstrip("/")] = data[: self.n_free]
        if self.n_free is not None and len(data) > self.n_free:
            raise ToolError(f"{path}: No space left on device")

    def _remove(self, argv: Sequence[str], stdin: bytes) -> ExecResult:
        del self.files[argv[-1]]
        return ExecResult(0, b"", b"")


class Editor:
    """A tool and its sandbox, called like an agent does."""

    def __init__(self, data: bytes | None = None) -> None:
        self.disk = Disk(data)
        self.tool: Tool = EditTool(self.disk)

    def __call__(self, command: str, path: str = PATH, **arguments: Any) -> str:
        result = self.tool.arguments(command=command, path=path, **arguments)
        return asyncio.run(self._observed(result))

    async def _observed(self, given: BaseModel) -> str:
        return (await self.tool.call(given, 10)).text

    def complaint(self, command: str, path: str = PATH, **arguments: Any) -> str:
        before = dict(self.disk.files)
        with pytest.raises(ToolError) as raised:
            self(command, path, **arguments)
        assert self.disk.files == before, "a refused edit changed something"
        return str(raised.value)

    @property
    def data(self) -> bytes | None:
        return self.disk.files.get(PATH)


def test_view_ends_where_the_file_does() -> None:
    assert Editor(b"one\ntwo\n")("view").splitlines()[1:] == ["     1\tone", "     2\ttwo"]
    assert Editor(b"one\ntwo")("view").splitlines()[1:] == ["     1\tone", "     2\ttwo", "[No newline at end of file]"]
    assert Editor(b"one\ntwo")("view", view_range=[1, 1]).splitlines()[1:] == ["     1\tone"]
    assert Editor(b"one\n\n")("view").splitlines()[1:] == ["     1\tone", "     2\t"]
    assert Editor(b"a\tb\x0c\xe2\x80\xa8c\n")("view").endswith("     1\ta\tb\x0c\u2028c")
    assert Editor(b"")("view") == Editor(b"")("view", view_range=[1, 5]) == f"The file {PATH} is empty."
    assert Editor(b"one\n")("view", view_range=[1, 9]).endswith("     1\tone\n[The file ends at line 1.]")


def test_view_of_a_long_file_is_limited() -> None:
    shown = Editor(b"".join(b"%d\n" % number for number in range(100_000)))("view")
    assert len(shown) < MAX_SHOWN_CHARS + 500
    *_, last, note = shown.splitlines()
    assert note == f"[Lines {int(last.split()[0]) + 1} to 100000 are left out; see them with `view_range`.]"
    shown = Editor(b"x" * 1_000_000)("view")
    assert "     1\txxx" in shown
    assert "[... 998000 more characters in this line]" in shown
    assert "has 5000001 bytes" in Editor(b"x" * 5_000_001).complaint("view")


def test_binary_file_is_refused() -> None:
    assert "is a binary file" in Editor(b"\x7fELF\0\0").complaint("view")
    assert "not a text file in UTF-8: it has the byte 0xe9 in line 2" in Editor(b"one\ncaf\xe9\n").complaint("view")
    latin = Editor(b"caf\xe9 one\n")
    assert "not a text file in UTF-8" in latin.complaint("str_replace", old_str="one", new_str="two")
    assert "not a text file in UTF-8" in latin.complaint("insert", insert_line=0, insert_text="two")


def test_windows_line_ends_are_read_as_newlines_and_kept() -> None:
    edit = Editor(b"one\r\ntwo\r\nthree\r\n")
    assert "     1\tone\n     2\ttwo\n" in edit("view")
    assert edit("view").endswith(r"[Its lines end in \r\n. Write \n for it; \r\n is kept in the file.]")
    edit("str_replace", old_str="one\ntwo", new_str="1\n2\n2b")
    assert edit.data == b"1\r\n2\r\n2b\r\nthree\r\n"
    assert "     4\tfour\n" in edit("insert", insert_line=3, insert_text="four")
    assert edit.data == b"1\r\n2\r\n2b\r\nfour\r\nthree\r\n"
    edit("str_replace", old_str="four\r\nthree\r\n", new_str="")
    assert edit.data == b"1\r\n2\r\n2b\r\n"
    for _ in range(3):
        edit("undo_edit")
    assert edit.data == b"one\r\ntwo\r\nthree\r\n"


def test_mixed_line_ends_stay_mixed() -> None:
    edit = Editor(b"one\r\ntwo\nthree\r\n")
    assert r"some lines of the file end in \r\n" in edit.complaint("str_replace", old_str="one\ntwo", new_str="")
    edit("str_replace", old_str="one\r\ntwo\n", new_str="1\n")
    assert edit.data == b"1\nthree\r\n"


@pytest.mark.parametrize(
    ("before", "line", "text", "after"),
    [
        (b"", 0, "x", b"x\n"),
        (b"a\nb\n", 0, "x", b"x\na\nb\n"),
        (b"a\nb\n", 1, "x\n", b"a\nx\nb\n"),
        (b"a\nb\n", 2, "x", b"a\nb\nx\n"),
        (b"a\nb", 2, "x", b"a\nb\nx"),
        (b"a\nb", 1, "x", b"a\nx\nb"),
        (b"a\n", 1, "", b"a\n\n"),
        (b"a\x0cb\xe2\x80\xa8c\nd\n", 1, "x", b"a\x0cb\xe2\x80\xa8c\nx\nd\n"),
    ],
)
def test_insert_adds_lines_and_can_be_undone(before: bytes, line: int, text: str, after: bytes) -> None:
    edit = Editor(before)
    edit("insert", insert_line=line, insert_text=text)
    assert edit.data == after
    edit("undo_edit")
    assert edit.data == before


def test_insert_counts_lines_as_view_does() -> None:
    edit = Editor(b"a\x0cb\nc")
    assert "     2\tc" in edit("view")
    assert r"[0, 2]" in edit.complaint("insert", insert_line=3, insert_text="x")


def test_str_replace_searches_every_place() -> None:
    edit = Editor(b"aaa\n" * 50)
    result = edit.complaint("str_replace", old_str="aaa\naa", new_str="")
    assert f"in lines {list(range(1, 21))} and more" in result
    overlapping = Editor(b"xaaax\n").complaint("str_replace", old_str="aa", new_str="b")
    assert "Multiple occurrences of old_str `aa` in lines [1, 1]" in overlapping
    assert len(Editor(b"").complaint("str_replace", old_str="y" * 100_000, new_str="")) < 3000
    assert "old_str is empty" in Editor(b"").complaint("str_replace", old_str="", new_str="x")


@pytest.mark.parametrize(
    ("old", "hint"),
    [
        ("     1\tdef f():\n     2\t    return 1", "`old_str` has the line numbers that `view` puts before each line"),
        ("     2\t    return 1\n", "`old_str` has the line numbers"),
        ("def f():\n  return 1", "differ from lines 1 to 2, which are:\n     1\tdef f():\n     2\t    return 1"),
        ("def f():\n\n    return 1", "Only blanks or line breaks differ from lines 1 to 2"),
        ("\treturn 1", "Only blanks or line breaks differ from lines 2 to 2, which are:\n     2\t    return 1"),
        ("def f():\r\n    return 1", r"Only line breaks differ: the lines of the file end only in \n."),
        ("def g():", "did not appear verbatim in /workspace/a.txt."),
        ("   \n ", "did not appear verbatim in /workspace/a.txt."),
    ],
)
def test_near_miss_is_explained(old: str, hint: str) -> None:
    result = Editor(b"def f():\n    return 1\n").complaint("str_replace", old_str=old, new_str="x")
    assert result.startswith("No replacement was performed, old_str `")
    assert hint in result
    if hint.endswith("a.txt."):
        assert result.endswith(hint)


@given(words=st.lists(st.sampled_from(["a", "bb", "(", "\\d", "é"]), min_size=1), data=st.data())
def test_near_miss_names_the_similar_lines(words: list[str], data: st.DataObject) -> None:
    blanks = st.sampled_from([" ", "\n", "  ", "\t\n", "\u2003"])
    text = "".join(word + data.draw(blanks) for word in words)
    start = data.draw(st.integers(0, len(words) - 1))
    part = words[start : data.draw(st.integers(start + 1, len(words)))]
    result = explained(text, "   ".join(part))
    if "   ".join(part) not in text:
        assert result.startswith("Only blanks or line breaks differ from lines "), result
        first, last = (int(word) for word in result.split(",")[0].split() if word.isdigit())
        assert " ".join(part) in " ".join("\n".join(text.split("\n")[first - 1 : last]).split())


def test_undo_reverts_step_by_step() -> None:
    edit = Editor()
    edit("create", file_text="one\n")
    edit("str_replace", old_str="one", new_str="two")
    edit("insert", insert_line=1, insert_text="three")
    edit("create", file_text="all new")
    other = "//workspace/./a.txt"
    assert edit("undo_edit", other).startswith(
        f"Last edit to {other} undone successfully. Here's the result of running `cat -n` on a snippet of it:\n"
        "     1\ttwo\n     2\tthree\n"
    )
    edit("undo_edit")
    assert edit.data == b"two\n"
    edit("undo_edit")
    assert edit.data == b"one\n"
    assert edit("undo_edit") == f"Last edit to {PATH} undone successfully. The file had been created by it and is gone."
    assert edit.data is None
    assert edit.complaint("undo_edit") == f"No edit history found for {PATH}."


def test_undo_affects_one_file() -> None:
    edit = Editor(b"one\n")
    edit("str_replace", old_str="one", new_str="two")
    edit("create", "/workspace/b.txt", file_text="b")
    edit("undo_edit")
    assert edit.disk.files == {PATH: b"one\n", "/workspace/b.txt": b"b"}


def test_undo_never_loses_changes_by_other_programs() -> None:
    edit = Editor(b"one\n")
    edit("str_replace", old_str="one", new_str="two")
    edit.disk.files[PATH] = b"two\nby hand\n"
    assert "something else has changed the file since" in edit.complaint("undo_edit")
    edit("insert", insert_line=2, insert_text="three")
    edit("undo_edit")
    assert edit.data == b"two\nby hand\n"
    assert "something else has changed the file since" in edit.complaint("undo_edit")
    edit.disk.files[PATH] = b"two\n"
    edit("undo_edit")
    assert edit.data == b"one\n"
    edit("str_replace", old_str="one", new_str="two")
    del edit.disk.files[PATH]
    assert f"{PATH} does not exist" in edit.complaint("undo_edit")


def test_create_over_a_binary_file_can_be_undone() -> None:
    edit = Editor(b"\xff\0\xfe")
    edit("create", file_text="text")
    assert edit("undo_edit") == f"Last edit to {PATH} undone successfully."
    assert edit.data == b"\xff\0\xfe"


def test_full_disk_loses_nothing() -> None:
    edit = Editor(b"one\n")
    edit.disk.n_free = 6
    for change in (
        {"command": "str_replace", "old_str": "one", "new_str": "1" * 50},
        {"command": "insert", "insert_line": 1, "insert_text": "1" * 50},
        {"command": "create", "file_text": "1" * 50},
    ):
        assert "No space left on device" in edit.complaint(**change)
        assert edit.complaint("undo_edit") == f"No edit history found for {PATH}."


def test_text_that_becomes_binary_can_still_be_edited() -> None:
    edit = Editor(b"one\n")
    assert edit("str_replace", old_str="one", new_str="\0") == f"The file {PATH} has been edited."
    edit("undo_edit")
    assert edit.data == b"one\n"


def test_errors_about_paths_use_the_words_of_editors() -> None:
    edit = Editor(b"x")
    for command in ("view", "str_replace", "insert"):
        given_all = {"old_str": "x", "insert_line": 0, "insert_text": ""} if command != "view" else {}
        assert (
            edit.complaint(command, "/no", **given_all) == "The path /no does not exist. Please provide a valid path."
        )
    assert "is a directory and only the `view` command can be used" in edit.complaint(
        "create", "/workspace", file_text=""
    )
    assert "NUL" in edit.complaint("view", "/a\0b")
    assert "Maybe you meant /a.txt?" in edit.complaint("view", "a.txt")


def change(path: str, n_removed: int) -> Change:
    return Change(path, 0, b"x" * n_removed, 0, digest(b""))


def test_history_is_limited() -> None:
    history = History(max_changes=3, max_bytes=100)
    for number in range(10):
        history.add(change(f"/{number}", 10))
    assert [history.last(f"/{number}") is not None for number in range(10)] == [False] * 7 + [True] * 3
    history.add(change("/big", 95))
    assert history.last("/9") is None
    assert history.n_bytes == 95
    history.add(change("/big", 101))
    assert history.last("/big") is None, "changes before a forgotten one cannot be undone either"
    assert history.n_bytes == 0


@given(st.binary(max_size=50), st.binary(max_size=50), st.integers(0, 50), st.integers(0, 50))
def test_undone_change_gives_the_file_before(before: bytes, new: bytes, offset: int, n_removed: int) -> None:
    offset = min(offset, len(before))
    removed = before[offset : offset + n_removed]
    after = before[:offset] + new + before[offset + len(removed) :]
    made = Change(PATH, offset, removed, len(new), digest(after))
    assert made.left(after)
    assert made.undone(after) == before


def test_names_with_line_breaks_are_listed_in_one_line() -> None:
    assert listed(["/a", "/b\n/c", "/\x1b[31m"]) == ('/a\n"/b\\n/c"\n"/\\u001b[31m"', 0)
    shown, n_left_out = listed([f"/{'x' * 40}{number}" for number in range(100_000)])
    assert len(shown) <= MAX_SHOWN_CHARS
    assert len(shown.splitlines()) + n_left_out == 100_000
    assert numbered(["a"], 1, 9) == "     1\ta"
