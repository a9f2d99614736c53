"""Sandboxes from images of their own: a folder, and an image file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.interfaces import Sandbox
from workers.sandboxes.owner import give

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]
PROGRAMS = ("bash", "cat", "ls", "rm", "mkdir", "grep", "sed")


@pytest.fixture(scope="session")
def small_image(farm_folder: Path) -> Path:
    """A root file system with a handful of programs."""
    image = farm_folder / "small"
    for folder in ("usr/bin", "etc", "tmp", "opt/data/deep"):
        (image / folder).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    for program in PROGRAMS:
        path = shutil.which(program)
        assert path
        shutil.copy(path, image / "usr/bin" / program)
    # what the farm's Python takes from the system, any real image has
    for binary in (*(image / "usr/bin").iterdir(), Path(sys.executable).resolve()):
        listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(?:=> |\t)(/[^ ]*) \(", listed):
            if not Path(library).exists() or library.startswith(sys.base_prefix):
                continue
            target = image / "usr" / library.removeprefix("/usr").lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    (image / "etc/mark").write_text("small image\n")
    (image / "opt/data/deep/file").write_text("x")
    return image


@pytest.fixture(scope="session")
def image_file(small_image: Path, apptainer: Path) -> Path:
    path = small_image.with_suffix(".sif")
    subprocess.run([apptainer, "build", str(path), str(small_image)], capture_output=True, check=True)
    path.chmod(0o644)
    return path


def works(run: Run, sandbox: Sandbox) -> None:
    script = "cat /etc/mark; rm -rf /opt/data; ls -A /opt; sed -i s/small/big/ /etc/mark; cat /etc/mark"
    result = run(sandbox.exec(["bash", "-c", script], timeout_s=10))
    assert (result.stdout, result.stderr) == (b"small image\nfarm\nbig image\n", b"")
    shell = run(sandbox.open_shell())
    assert run(shell.run("echo $((6 * 7)); pwd", 5)).output == "42\n/workspace\n"
    run(shell.close())


def test_a_folder(start: Start, run: Run, small_image: Path) -> None:
    give(small_image)
    works(run, start(image=str(small_image)))
    works(run, start(image=str(small_image)))
    assert (small_image / "etc/mark").read_text() == "small image\n"


def test_an_image_file(start: Start, run: Run, image_file: Path) -> None:
    works(run, start(image=str(image_file)))
    works(run, start(image=str(image_file)))


def test_an_image_file_that_is_none(start: Start, farm_folder: Path) -> None:
    broken = farm_folder / "broken.sif"
    broken.write_bytes(os.urandom(1000))
    with pytest.raises(Exception, match=r"broken\.sif could not be unpacked"):
        start(image=str(broken))


@pytest.mark.skipif(sys.base_prefix == "/usr", reason="the system's own Python cannot be lent to another system")
def test_the_farms_python_comes_along(start: Start, run: Run, small_image: Path) -> None:
    give(small_image)
    result = run(
        start(image=str(small_image)).exec(["python3", "-S", "-c", "import json; print(json.dumps(1))"], timeout_s=10)
    )
    assert (result.stdout, result.stderr) == (b"1\n", b"")
