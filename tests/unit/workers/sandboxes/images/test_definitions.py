"""Definition files: the parts of the node that they may use, and those that they must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.errors import ImageError
from workers.sandboxes.images.definitions import parse, read

SIMPLE = """\
Bootstrap: localimage
From: base.sif  # a comment

%files
    # a comment
    data /opt/data
    "two words.txt" /opt/
    *.py /opt/src/

%post
    echo From: nothing
    %notasection
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name in ("base.sif", "two words.txt", "a.py", "b.py"):
        (tmp_path / name).touch()
    (tmp_path / "data").mkdir()
    return tmp_path / "x.def"


def lent(text: str, path: Path) -> list[str]:
    """Return the definition as the builder gets it, each path shown by its name in the builder."""
    definition = parse(text, path)
    return definition.lent(lambda source, name, owned: Path("/lent", name)).splitlines()


def test_sources_of_a_definition_are_listed(path: Path) -> None:
    names = [source.name for source in parse(SIMPLE, path).sources()]
    assert names == ["base.sif", "data", "two words.txt", "a.py", "b.py"]


def test_paths_are_replaced_by_those_in_the_builder(path: Path) -> None:
    lines = lent(SIMPLE, path)
    assert lines[1] == "From: /lent/base-0.sif"
    assert lines[5:10] == [
        '"/lent/files-0-0/data" "/opt/data"',
        '"/lent/files-1-0/two words.txt" "/opt/"',
        '"/lent/files-2-0/a.py" "/opt/src/"',
        '"/lent/files-2-1/b.py" "/opt/src/"',
        "",
    ]
    assert "    echo From: nothing" in lines


def test_source_without_a_target_keeps_its_own_path(path: Path) -> None:
    absolute = path.with_name("a.py")
    text = f"Bootstrap: localimage\nFrom: base.sif\n%files\ndata\n*.py\n{absolute}\ndata/.  /x\n. /y\n"
    assert lent(text, path)[3:] == [
        '"/lent/files-0-0/data" "data"',
        '"/lent/files-1-0/a.py" "a.py"',
        '"/lent/files-1-1/b.py" "b.py"',
        f'"/lent/files-2-0/a.py" "{absolute}"',
        '"/lent/files-3-0/data/." "/x"',
        f'"/lent/files-4-0/{path.parent.name}/." "/y"',
        "",
    ]


def test_stages_are_parsed(path: Path) -> None:
    text = "Bootstrap: localimage\nFrom: base.sif\nStage: one\n%post\n true\nBootstrap: docker\nFrom: name:1\n"
    text += "%files from one\n    /made /made\n%files\n    a.py /a.py\n"
    definition = parse(text, path)
    assert [source.name for source in definition.sources()] == ["base.sif", "a.py"]
    assert definition.from_registry
    assert "    /made /made" in lent(text, path)


def test_base_may_have_a_tag(path: Path) -> None:
    path.with_name("base.tar").touch()
    text = "Bootstrap: docker-archive\nFrom: base.tar:small:1\n"
    assert lent(text, path)[1] == "From: /lent/base-0.tar:small:1"


@pytest.mark.parametrize("section", ["%setup", "%pre", "  %Setup", "%SETUP -x"])
def test_sections_that_run_on_the_node_are_refused(path: Path, section: str) -> None:
    with pytest.raises(ImageError, match="would run on the node itself"):
        parse(f"Bootstrap: localimage\nFrom: base.sif\n{section}\n    true\n", path)


@pytest.mark.parametrize("written", ["$HOME/x", "`id`", "$(id)", "a;b", "{{ X }}", "~/x", "'a b'"])
def test_paths_must_be_plain(path: Path, written: str) -> None:
    with pytest.raises(ImageError, match=r"plain|depends on who builds it"):
        parse(f"Bootstrap: localimage\nFrom: base.sif\n%files\n    {written} /x\n", path)


def test_template_is_rendered_with_its_values(path: Path) -> None:
    template = path.with_name("x.def.j2")
    path.with_name("part.j2").write_text("%post\n    echo {{ word }}\n")
    template.write_text("Bootstrap: localimage\nFrom: {{ base }}\n{% include 'part.j2' %}")
    assert read(template, {"base": "base.sif", "word": "a"}).text == (
        "Bootstrap: localimage\nFrom: base.sif\n%post\n    echo a\n"
    )
    path.with_name("part.j2").write_text("%post\n    echo other {{ word }}\n")
    assert "echo other b" in read(template, {"base": "base.sif", "word": "b"}).text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{{ missing }}", "'missing' is undefined"),
        ("{% for %}", "line 1"),
        ("{{ word.__class__.__mro__[1].__subclasses__() }}", "unsafe|not safely"),
        ("{% include '../secret' %}", "secret"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_template_that_cannot_be_rendered_is_refused(path: Path, text: str, complaint: str) -> None:
    path.parent.with_name("secret").write_text("secret")
    template = path.with_name("x.def.j2")
    template.write_text(text)
    with pytest.raises(ImageError, match=complaint):
        read(template, {"word": "a"})


@pytest.mark.parametrize("value", ["a\n%setup\n touch /x", "a\r%setup", "a\u2028b", "\x1b[31m"])
def test_value_with_line_breaks_is_refused(path: Path, value: str) -> None:
    template = path.with_name("x.def.j2")
    template.write_text("Bootstrap: localimage\nFrom: base.sif\n%post\n    echo {{ word }}\n")
    with pytest.raises(ImageError, match="the value of word"):
        read(template, {"word": value})


def test_section_from_a_value_is_checked_like_any_other(path: Path) -> None:
    template = path.with_name("x.def.j2")
    template.write_text("Bootstrap: localimage\nFrom: base.sif\n{{ word }}\n")
    with pytest.raises(ImageError, match="would run on the node itself"):
        read(template, {"word": "%setup"})


def test_binary_file_is_refused(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ImageError, match="cannot be read"):
        read(path, {})
    with pytest.raises(ImageError, match="cannot be read"):
        read(path.with_name("gone.def"), {})
