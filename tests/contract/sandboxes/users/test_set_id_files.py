"""Set-user-ID and set-group-ID bits of images in all formats, as `su` and `sudo` need them for users except root."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from testkit.scratch_folder import sandbox_config
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS
from tests.services.images import PROGRAMS, docker_archive, oci_archive, root_folder, sif_file
from tests.services.servers.registry import registry
from tests.services.soak import at_length
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.building.builder import copy_tree
from workers.sandboxes.images.image import image, set_alias
from workers.sandboxes.sandbox_user import give, sandbox_user

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

MODES = {"opt/id-of-root": 0o4755, "opt/group": 0o2755, "opt/open": 0o1777, "opt/shared": 0o2775, "opt/closed": 0o0}
FORMS = ("folder", "given", "sif", "docker-archive", "oci-archive", "registry", "definition", "dockerfile")
EACH = at_length(list(zip(cycle(PROVIDERS), FORMS, strict=False)), list(product(PROVIDERS, FORMS)))


@pytest.fixture(scope="module")
def base(open_folder: Path) -> Path:
    """Return a root file system with a program that gives root to its caller, and files of the farm's own user."""
    root = root_folder(open_folder / "set-id", [*PROGRAMS, "id", "cp"])
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\napp:x:1500:1500::/tmp:/bin/bash\n")
    (root / "opt/id-of-root").write_bytes((root / "usr/bin/id").read_bytes())
    for name in ("group", "closed"):
        (root / "opt" / name).write_text("x")
    for name in ("open", "shared"):
        (root / "opt" / name).mkdir()
    for name, mode in MODES.items():
        (root / name).chmod(mode)
    return root


@contextmanager
def named(base: Path, form: str, apptainer: Path) -> Iterator[str]:
    config = sandbox_config()
    made = base.with_name(f"set-id-{form}")
    if form == "registry":
        with registry(base) as (names, _):
            yield f"{names}/team/set-id:1"
        return
    if form == "folder":
        made = base
    elif form == "given" and not made.exists():
        copy_tree(base, made)
        give(made, config.user)
    elif form == "docker-archive":
        made = docker_archive(base, made.with_suffix(".tar"))
    elif form == "oci-archive":
        made = oci_archive(base, made.with_suffix(".tar"))
    elif form == "dockerfile":
        set_alias(config, "set-id:1", str(base))
        made.mkdir(exist_ok=True)
        (made / "Dockerfile").write_text(
            "FROM set-id:1 AS other\nFROM set-id:1\nCOPY --from=other /opt/id-of-root /opt/copied\n"
            "RUN rm /opt/id-of-root && cp -p /opt/copied /opt/id-of-root\n"
        )
        made = Path(f"dockerfile:{made}")
    if form in ("sif", "definition"):
        made = sif_file(apptainer, base, base.with_name("set-id.sif"))
    if form == "definition":
        made = base.with_name("set-id.def")
        made.write_text("Bootstrap: localimage\nFrom: set-id.sif\n")
    yield str(made)


@pytest.mark.soak
@pytest.mark.parametrize(("provider", "form"), EACH, indirect=["provider"])
def test_set_user_id_file_gives_root(form: str, start: Start, run: Run, base: Path, apptainer: Path) -> None:
    """All formats are converted to folders before any kind of sandbox sees them, so each is tried with one kind."""
    with named(base, form, apptainer) as name:
        sandbox = start(image=name, user="app")
        result = run(sandbox.exec(["bash", "-c", "id -u; /opt/id-of-root -u"], timeout_s=20))
        assert (result.stdout, result.stderr) == (b"1500\n0\n", b"")
        root = image(sandbox_config(), name).folder
        modes = {each: (root / each).lstat().st_mode & 0o7777 for each in MODES}
        # a builder must be able to read the files that it copies
        assert {**modes, "opt/closed": 0} == MODES


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user")
def test_ordinary_user_copies_files_of_another_user(base: Path, open_folder: Path) -> None:
    user = sandbox_user(sandbox_config().user)
    assert user
    place = open_folder / "of-an-ordinary-user"
    place.mkdir()
    os.chown(place, *user)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(user[1], user[1], user[1])
            os.setresuid(user[0], user[0], user[0])
            copy_tree(base / "opt/id-of-root", place / "copied")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    status = (place / "copied").stat()
    assert (status.st_uid, status.st_mode & 0o7777) == (user[0], 0o4755)


def test_set_id_file_with_two_links_keeps_its_bits(base: Path, open_folder: Path) -> None:
    folder = open_folder / "linked"
    folder.mkdir()
    (folder / "a").write_text("x")
    (folder / "b").hardlink_to(folder / "a")
    (folder / "c").symlink_to(base / "opt/id-of-root")
    (folder / "a").chmod(0o6711)
    give(folder, sandbox_config().user)
    assert {(folder / name).lstat().st_mode & 0o7777 for name in "ab"} == {0o6711}
    assert (base / "opt/id-of-root").stat().st_mode & 0o7777 == 0o4755
