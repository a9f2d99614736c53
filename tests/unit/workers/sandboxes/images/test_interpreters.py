"""A Python that is newer than the farm's: on PATH, next to the farm's own, or from uv."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farm.errors import SandboxError
from workers.sandboxes.images import environments
from workers.sandboxes.images.environments import interpreter_for

PYTHON = """#!/bin/sh
echo '["{path}", "{prefix}", "3.40.1"]'
"""
UV = """#!/bin/sh
[ "$2" = install ] && {{ {install}; }}
[ -e {python} ] && echo {python} || exit 2
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def python(prefix: Path, name: str = "python3.40") -> Path:
    path = prefix / "bin" / name
    return program(path, PYTHON.format(path=path, prefix=prefix))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose only Python is the farm's."""
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "versions" / "3.11.7"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "farm" / "bin" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/usr/bin:/bin")
    for each in (environments._probed, environments._of_uv):
        each.cache_clear()
    return tmp_path


def test_farms_own_python_is_used_if_it_is_new_enough() -> None:
    for oldest in ("", "3.0", ".".join(map(str, sys.version_info[:2]))):
        assert interpreter_for(oldest)[1:] == (sys.base_prefix, sys.version)


def test_python_on_the_path_is_used(home: Path) -> None:
    program(home / "path" / "python3.41", PYTHON.format(path="/a/python3.41", prefix="/a"))
    assert interpreter_for("3.40") == ("/a/python3.41", "/a", "3.40.1")


def test_python_next_to_the_farms_own_is_used_if_that_on_the_path_does_not_run(home: Path) -> None:
    # like the shims of pyenv, for a version that is not selected
    program(home / "path" / "python3.40", "#!/bin/sh\nexit 127\n")
    prefix = home / "versions" / "3.40.1"
    path = python(prefix)
    assert interpreter_for("3.40") == (str(path), str(prefix), "3.40.1")


def test_python_for_another_machine_is_skipped(home: Path) -> None:
    program(home / "path" / "python3.40", "\x7fELF")
    path = python(home / "versions" / "3.40.1")
    assert interpreter_for("3.40")[0] == str(path)


@pytest.mark.parametrize("where", ["path", "farm/bin"])
def test_uv_installs_a_python(home: Path, where: str) -> None:
    source, target = python(home / "source"), home / "uv" / "bin" / "python3.40"
    install = f"mkdir -p {target.parent} && cp {source} {target}"
    program(home / where / "uv", UV.format(python=target, install=install))
    assert interpreter_for("3.40")[2] == "3.40.1"
    # now it exists
    program(home / where / "uv", UV.format(python=target, install="exit 9"))
    environments._of_uv.cache_clear()
    assert interpreter_for("3.40")[2] == "3.40.1"


def test_missing_python_is_reported_with_a_remedy(home: Path) -> None:
    with pytest.raises(SandboxError, match=r"3\.40 or newer is needed.*`uv python install 3\.40`"):
        interpreter_for("3.40")
    program(home / "path" / "uv", UV.format(python="/not/there", install="echo no network >&2; exit 1"))
    with pytest.raises(SandboxError, match=r"uv could not install one: no network: install one with"):
        interpreter_for("3.40")
    broken = program(home / "broken", "#!/bin/sh\nexit 1\n")
    program(home / "path" / "uv", UV.format(python=broken, install="true"))
    with pytest.raises(SandboxError, match=r"that of uv does not run: it printed nothing"):
        interpreter_for("3.40")
