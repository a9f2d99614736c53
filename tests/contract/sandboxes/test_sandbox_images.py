"""Sandboxes from custom images: a folder, an image file, archives, definitions; and from invalid ones."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.errors import ImageError
from tests.services.images import ENTRYPOINT, docker_archive, oci_archive, root_folder, sif_file
from tests.services.servers.registry import registry
from workers.config import SandboxConfig
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.building.builder import workplace
from workers.sandboxes.images.building.oci_layouts import LAYOUT, shared_blobs
from workers.sandboxes.images.dockerfile.image_config import Healthcheck
from workers.sandboxes.images.image import image, set_alias
from workers.sandboxes.images.runtime import own_folder
from workers.sandboxes.sandbox import NodeSandbox
from workers.sandboxes.sandbox_user import give, sandbox_user

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

DEFINITION = """\
Bootstrap: localimage
From: small.sif

%files
    words/*.txt /opt/words/
    mark

%post
    cat /mark >>/etc/mark
    rm -rf /opt/data
    chown 33:33 /etc/mark || echo 'no owner of that number here'

%environment
    export GREETING="hello from the definition"
"""


@pytest.fixture(scope="module")
def small_image(open_folder: Path) -> Path:
    """Return a folder that belongs to the user of the tests."""
    return root_folder(open_folder / "small")


@pytest.fixture(scope="module")
def image_file(small_image: Path, apptainer: Path) -> Path:
    return sif_file(apptainer, small_image, small_image.with_suffix(".sif"))


@pytest.fixture(scope="module")
def definition(image_file: Path) -> Path:
    folder = image_file.parent
    (folder / "words").mkdir()
    for word in ("one", "two"):
        (folder / "words" / f"{word}.txt").write_text(f"{word}\n")
    (folder / "mark").write_text("and more\n")
    (folder / "small.def").write_text(DEFINITION)
    return folder / "small.def"


def works(run: Run, sandbox: Sandbox) -> None:
    script = "cat /etc/mark; rm -rf /opt/data; ls -A /opt; sed -i s/small/big/ /etc/mark; cat /etc/mark"
    assert output_of(run, sandbox, script) == "small image\nbig image\n"
    shell = run(sandbox.open_shell())
    assert run(shell.run("echo $((6 * 7)); pwd", 5)).output == "42\n/workspace\n"
    run(shell.close())


def has_config(run: Run, sandbox: Sandbox) -> None:
    """Check the configuration that the image declares, and that its programs run with it."""
    assert output_of(run, sandbox, "pwd; echo $HOME") == "/opt/own\n/\n"
    assert isinstance(sandbox, NodeSandbox)
    config = sandbox.image_config()
    assert (config.workdir, config.user, config.entrypoint) == ("/opt/own", "7:8", ENTRYPOINT)
    assert config.healthcheck == Healthcheck("test -e /opt", 2.0)


def output_of(run: Run, sandbox: Sandbox, script: str) -> str:
    result = run(sandbox.exec(["bash", "-c", script], timeout_s=10))
    assert result.stderr == b""
    return str(result.stdout.decode())


def test_folder_is_a_usable_image(start: Start, run: Run, small_image: Path) -> None:
    works(run, start(image=str(small_image)))
    works(run, start(image=str(small_image)))
    assert (small_image / "etc/mark").read_text() == "small image\n"


def test_folder_of_the_sandbox_user_is_used_in_place(
    open_folder: Path, start: Start, run: Run, config: SandboxConfig
) -> None:
    folder = open_folder / "given"
    if not folder.exists():
        give(root_folder(folder), config.user)
    assert image(config, str(folder)).folder == folder
    works(run, start(image=str(folder)))


def test_image_file_is_a_usable_image(start: Start, run: Run, image_file: Path) -> None:
    works(run, start(image=str(image_file)))
    works(run, start(image=str(image_file)))


@pytest.mark.parametrize("name", ["docker-archive:{}/d.tar", "{}/d.tar.gz", "oci-archive:{}/o.tar", "{}/bare.tar"])
def test_archive_is_a_usable_image(start: Start, run: Run, small_image: Path, apptainer: Path, name: str) -> None:
    folder = small_image.parent
    for archive in (folder / "d.tar", folder / "d.tar.gz"):
        archive.exists() or docker_archive(small_image, archive)
    for archive in (folder / "o.tar", folder / "bare.tar"):
        archive.exists() or oci_archive(small_image, archive, folders_listed=archive.name == "o.tar")
    sandbox = start(image=name.format(folder))
    assert (
        output_of(run, sandbox, "cat /opt/own/added; ls /opt; rm -r /opt/own; ls /opt") == "by the second layer\nown\n"
    )
    has_config(run, start(image=name.format(folder), workdir=""))
    greeting, path = output_of(run, sandbox, "echo $GREETING; echo $PATH").splitlines()
    assert greeting == "hello from the image"
    assert "/opt/own/bin" in path.split(":")


@pytest.mark.parametrize("unlisted", [False, True], ids=["listed", "unlisted"])
def test_image_of_an_archive_is_selected_by_its_tag(
    start: Start, run: Run, small_image: Path, apptainer: Path, unlisted: bool
) -> None:
    packed = small_image.parent / f"tagged-{unlisted}.tar"
    packed.exists() or oci_archive(small_image, packed, folders_listed=not unlisted)
    assert output_of(run, start(image=f"oci-archive:{packed}:latest"), "cat /opt/own/added") == "by the second layer\n"
    with pytest.raises(ImageError, match="is not in its archive: it has no image 'other', but latest"):
        start(image=f"oci-archive:{packed}:other")
    saved = small_image.parent / "saved.tar"
    saved.exists() or docker_archive(small_image, saved)
    assert (
        output_of(run, start(image=f"docker-archive:{saved}:small:1"), "cat /opt/own/added") == "by the second layer\n"
    )
    with pytest.raises(ImageError, match="it has no image 'small:2', but small:1"):
        start(image=f"docker-archive:{saved}:small:2")


def test_definition_is_built(start: Start, run: Run, definition: Path) -> None:
    sandbox = start(image=str(definition))
    script = "cat /etc/mark; ls /opt /opt/words; rm -r /opt/words; sed -i s/small/big/ /etc/mark; cat /etc/mark"
    before, after = "small image\nand more\n/opt:\nwords\n\n/opt/words:\none.txt\ntwo.txt\n", "big image\nand more\n"
    assert output_of(run, sandbox, script) == before + after
    assert output_of(run, sandbox, "echo $GREETING") == "hello from the definition\n"


def test_template_is_built_with_its_values(start: Start, run: Run, definition: Path) -> None:
    template = definition.with_name("template.def.j2")
    # its temporary files belong to the build
    post = "set -e; echo {{ word }} >/tmp/word; cat /tmp/word >/var/tmp/word; cat /var/tmp/word >>/etc/mark"
    template.write_text(f"Bootstrap: localimage\nFrom: {{{{ base }}}}.sif\n%post\n    {post}\n")
    for word in ("here", "there"):
        sandbox = start(image=str(template), image_values={"base": "small", "word": word})
        assert output_of(run, sandbox, "cat /etc/mark") == f"small image\n{word}\n"


def test_files_unreadable_to_the_sandbox_user_are_made_available(run: Run, start: Start, definition: Path) -> None:
    closed = definition.parent / "closed"
    if not closed.exists():
        closed.mkdir()
        (closed / "secret").write_text("not so secret\n")
        (closed / "secret").chmod(0o600)
        (closed / "it.def").write_text("Bootstrap: localimage\nFrom: base.sif\n%files\n    secret /etc/mark\n")
        (closed / "base.sif").write_bytes(definition.with_name("small.sif").read_bytes())
        closed.chmod(0o700)
    assert output_of(run, start(image=str(closed / "it.def")), "cat /etc/mark") == "not so secret\n"


BROKEN = {
    "missing.sif": (None, r"there is no /.*/missing\.sif on this node"),
    "nothing": (None, r"there is no /.*/nothing on this node: fix its name"),
    "random.sif": (b"%setup\n touch /gone\n", r"random\.sif is not a SIF file"),
    "random.tar": (os.urandom(3000), r"random\.tar is not a tar file"),
    "random.tar.gz": (gzip.compress(os.urandom(3000))[:-100], r"random\.tar\.gz is not a tar file"),
    "empty.def": (b"", r"empty\.def could not be built: .*"),
    "words.def": (
        b"Bootstrap: localimage\nFrom: small.sif\n%post\n echo last words; exit 7\n",
        r"last words \| .*status 7",
    ),
    "base.def": (
        b"Bootstrap: localimage\nFrom: gone.sif\n",
        r"base\.def begins with /.*/gone\.sif, which does not exist",
    ),
    "files.def": (
        b"Bootstrap: localimage\nFrom: small.sif\n%files\n gone /x\n",
        r"files\.def copies gone, which is not",
    ),
    "node.def": (
        b"Bootstrap: localimage\nFrom: small.sif\n%setup\n touch /x\n",
        r"%setup would run on the node itself",
    ),
    "values.def.j2": (b"From: {{ base }}", r"values\.def\.j2 cannot be rendered: 'base' is undefined"),
    "syntax.def.j2": (b"\n{% if %}", r"syntax\.def\.j2 cannot be rendered, line 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_invalid_image_is_refused_with_its_cause(start: Start, definition: Path, name: str) -> None:
    content, complaint = BROKEN[name]
    path = definition.parent / name
    if content is not None:
        path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ImageError, match=complaint) as raised:
            start(image=str(path))
        assert not raised.value.retryable, "to try it again would not help"


def test_truncated_image_file_is_refused(start: Start, image_file: Path) -> None:
    cut = image_file.with_name("cut.sif")
    cut.write_bytes(image_file.read_bytes()[:100_000])
    with pytest.raises(ImageError, match=r"cut\.sif could not be built: .*corruption") as raised:
        start(image=str(cut))
    assert not raised.value.retryable


def test_image_without_bash_is_refused(start: Start, open_folder: Path, apptainer: Path) -> None:
    bare = open_folder / "bare"
    if not bare.exists():
        root_folder(bare, programs=("ls", "cat"))
    packed = docker_archive(bare, open_folder / "no-bash.tar")
    for name in (bare, packed):
        with pytest.raises(ImageError, match=r"no bash|a bash in it"):
            start(image=str(name))


def test_registry_image_is_pulled_once(start: Start, run: Run, small_image: Path, apptainer: Path) -> None:
    with registry(small_image) as (names, content):
        assert output_of(run, start(image=f"{names}/team/small:1"), "cat /opt/own/added") == "by the second layer\n"
        n_requests = len(content.requested_paths)
        assert n_requests > 3
        has_config(run, start(image=f"{names}/team/small:1", workdir=""))
        assert len(content.requested_paths) == n_requests, "what is cached needs no network"


def test_images_of_a_registry_share_their_blobs(
    start: Start, small_image: Path, apptainer: Path, config: SandboxConfig
) -> None:
    shared = own_folder(config) / LAYOUT / "blobs/sha256"
    with registry(small_image) as (names, content):
        blobs = {each.removeprefix("sha256:") for each in content.blobs}
        for name in ("first", "second"):
            start(image=f"{names}/team/{name}:1")
            assert blobs <= {path.name for path in shared.iterdir()}
    (largest,) = (path for path in shared.iterdir() if path.name in blobs and path.stat().st_size > 1_000_000)
    with workplace(config) as place, shared_blobs(config, place) as folder:
        assert (folder / LAYOUT / "blobs/sha256" / largest.name).samefile(largest)


def test_image_file_of_a_registry_image_has_its_config(
    start: Start, run: Run, small_image: Path, apptainer: Path, tmp_path: Path
) -> None:
    saved = docker_archive(small_image, tmp_path / "d.tar")
    file = sif_file(apptainer, f"docker-archive:{saved}", tmp_path / "image.sif")
    has_config(run, start(image=str(file), workdir=""))


def test_dockerfile_inherits_the_config_of_its_base(
    start: Start, run: Run, small_image: Path, apptainer: Path, tmp_path: Path, config: SandboxConfig
) -> None:
    set_alias(config, "base:packed", f"docker-archive:{docker_archive(small_image, tmp_path / 'd.tar')}")
    (tmp_path / "Dockerfile").write_text("FROM base:packed\nRUN pwd >where\n")
    sandbox = start(image=f"dockerfile:{tmp_path}", workdir="")
    has_config(run, sandbox)
    assert output_of(run, sandbox, "cat /opt/own/where") == "/opt/own\n"
    assert output_of(run, sandbox, "ls -ln /opt/own/where").split()[2:4] == ["7", "8"]


def test_unreachable_registry_is_retryable(start: Start, apptainer: Path) -> None:
    with pytest.raises(
        ImageError, match=r"docker://127\.0\.0\.1:1/x/y could not be built; .* name a \.sif .*refused"
    ) as raised:
        start(image="docker://127.0.0.1:1/x/y")
    assert raised.value.retryable


def test_image_values_are_refused_without_a_template(start: Start, small_image: Path) -> None:
    with pytest.raises(ImageError, match="takes no image_values"):
        start(image=str(small_image), image_values={"x": "y"})


def test_images_belong_to_the_sandbox_user(
    small_image: Path, image_file: Path, definition: Path, config: SandboxConfig
) -> None:
    user = (sandbox_user(config.user) or (os.getuid(),))[0]
    for name in (small_image, image_file, definition):
        root = image(config, str(name)).folder
        assert {path.lstat().st_uid for path in (root, *root.rglob("*"))} <= {user}


@pytest.mark.skipif(sys.base_prefix == "/usr", reason="the system's own Python cannot be lent to another system")
def test_python_of_the_farm_is_available_in_the_image(start: Start, run: Run, small_image: Path) -> None:
    result = run(
        start(image=str(small_image)).exec(["python3", "-S", "-c", "import json; print(json.dumps(1))"], timeout_s=10)
    )
    assert (result.stdout, result.stderr) == (b"1\n", b"")
