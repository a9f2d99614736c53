"""Images with links where the container runtime writes files: they are built, and no file of the node is written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farm.errors import ImageError, SandboxError
from tests.services.images import docker_archive, oci_archive, root_folder
from tests.services.servers.registry import registry
from workers.plugins.interfaces import Sandbox

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

FILES = (
    *("etc/resolv.conf", "etc/hosts", ".singularity.d/env/90-environment.sh", ".singularity.d/env/01-base.sh"),
    *(".singularity.d/runscript", ".singularity.d/startscript", ".singularity.d/labels.json"),
    *(".singularity.d/Singularity", ".singularity.d/actions/exec", ".singularity.d/actions/run"),
)
ARCHIVES = ("docker-archive", "docker-archive.gz", "oci-archive", "oci-archive-unlisted")
FORMS = ("folder", *ARCHIVES, "registry", "definition")
PACKED = ("docker-archive", "oci-archive", "registry")
SYSTEMD = "../run/systemd/resolve/stub-resolv.conf"


@pytest.fixture(scope="module")
def plain_image(open_folder: Path) -> Path:
    return root_folder(open_folder / "plain")


@pytest.fixture
def node_folder(open_folder: Path) -> Iterator[Path]:
    """Yield a folder of the node that the sandbox user may write to."""
    folder = open_folder / "of-the-node"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def named(root: Path, form: str) -> Iterator[str]:
    """Yield the name of an image with the files of a folder, in one of the formats of images."""
    packed = root.with_suffix(".tar.gz" if form.endswith(".gz") else ".tar")
    packed.unlink(missing_ok=True)
    if form == "registry":
        with registry(root) as (names, _):
            yield f"{names}/team/{root.name}:1"
        return
    if form.startswith("oci"):
        oci_archive(root, packed, folders_listed=not form.endswith("unlisted"))
    elif form != "folder":
        docker_archive(root, packed)
    if form == "definition":
        written = root.with_suffix(".def")
        (root.parent / "mark").write_text("mark\n")
        written.write_text(f"Bootstrap: docker-archive\nFrom: {packed.name}\n%files\n    mark /out/mark\n")
        yield str(written)
        return
    yield str(root if form == "folder" else packed)


def linked(plain: Path, name: str, links: dict[str, str]) -> Path:
    """Return a copy of an image in which paths are links."""
    root = plain.with_name(name)
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(plain, root, symlinks=True)
    for path, target in links.items():
        at = root / path
        if at.is_dir() and not at.is_symlink():
            shutil.rmtree(at)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(target)
    return root


def on_node(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("form", FORMS)
def test_links_to_files_of_the_node_are_not_written_through(
    start: Start, run: Run, plain_image: Path, node_folder: Path, apptainer: Path, form: str
) -> None:
    links = {path: f"{node_folder}/{path.replace('/', '_')}" for path in FILES} | {"out": str(node_folder)}
    for target in list(links.values())[: len(FILES) : 2]:
        # every second one exists
        Path(target).write_text("of the node\n")
        Path(target).chmod(0o666)
    before = on_node(node_folder)
    with named(linked(plain_image, f"files-{form}", links), form) as name:
        try:
            sandbox = start(image=name)
        except ImageError:
            # its %files would be copied through a link
            assert form == "definition"
        else:
            assert run(sandbox.exec(["cat", "/etc/mark"], timeout_s=10)).stdout == b"small image\n"
    assert on_node(node_folder) == before


@pytest.mark.parametrize(
    ("folder", "form"),
    [
        *(
            (folder, form)
            for folder in (".singularity.d", "etc")
            for form in ("docker-archive", "oci-archive", "registry")
        ),
        *((folder, "docker-archive") for folder in ("run", "var", "dev", "proc", "tmp")),
    ],
)
def test_links_to_folders_of_the_node_are_not_written_through(
    start: Start, plain_image: Path, node_folder: Path, apptainer: Path, folder: str, form: str
) -> None:
    root = linked(plain_image, f"{folder.strip('.')}-{form}", {folder: str(node_folder)})
    # some of these are images on which no sandbox can start
    with named(root, form) as name, contextlib.suppress(ImageError, SandboxError):
        start(image=name)
    assert on_node(node_folder) == {}


@pytest.mark.parametrize("form", ["folder", *ARCHIVES, "registry"])
def test_image_of_systemd_is_built(start: Start, run: Run, plain_image: Path, apptainer: Path, form: str) -> None:
    with named(linked(plain_image, f"systemd-{form}", {"etc/resolv.conf": SYSTEMD}), form) as name:
        sandbox = start(image=name)
        assert run(sandbox.exec(["cat", "/etc/mark"], timeout_s=10)).stdout == b"small image\n"
        if form != "folder":
            result = run(sandbox.exec(["cat", "/opt/own/added"], timeout_s=10))
            assert result.stdout == b"by the second layer\n"
