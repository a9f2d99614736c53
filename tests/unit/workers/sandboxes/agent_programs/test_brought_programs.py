"""Programs of an agent: made once, identified by content, refused if they differ from their declaration."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from farm.errors import AgentMissing, SandboxError
from farm.records.sandbox_spec import AgentProgram
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.services.images import root_folder
from tests.unit.workers.sandboxes.images.test_archives import BROKEN_ARCHIVES, tar
from workers.sandboxes.agent_programs.brought_programs import brought
from workers.testing.serving import serving


@pytest.fixture(autouse=True)
def _farm(tmp_path: Path) -> Iterator[None]:
    with farm_in(tmp_path / "farm"):
        yield


def folder_of(kind: str, source: Path | str, digest: str = "") -> Path:
    program = AgentProgram(name="tool", kind=kind, source=str(source), digest=digest)  # type: ignore[arg-type]
    ((folder, target),) = brought(sandbox_config(), [program]).binds
    assert target == "/opt/farm/tool"
    return Path(folder)


def lock_in(folder: Path, integrity: str = "") -> Path:
    """Return a lock of one tiny package, a file next to it."""
    described = {"name": "tiny", "version": "1.0.0", "bin": {"tiny": "cli.js"}, "scripts": {"postinstall": "touch ran"}}
    tarball = tar(folder / "tiny-1.0.0.tgz", {"package/package.json": json.dumps(described), "package/cli.js": "//"})
    own = "sha512-" + base64.b64encode(hashlib.sha512(tarball.read_bytes()).digest()).decode()
    lock = {
        "name": "little",
        "lockfileVersion": 3,
        "requires": True,
        "packages": {
            "": {"name": "little", "dependencies": {"tiny": "file:tiny-1.0.0.tgz"}},
            "node_modules/tiny": {
                "version": "1.0.0",
                "resolved": "file:tiny-1.0.0.tgz",
                "integrity": integrity or own,
                "hasInstallScript": True,
                "bin": {"tiny": "cli.js"},
            },
        },
    }
    path = folder / "little.lock.json"
    path.write_text(json.dumps(lock))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def left() -> list[str]:
    """Return all entries other than complete ones: partial folders, downloads."""
    programs = settings().cache / "programs"
    return [each.name for each in programs.iterdir() if each.is_dir() and "." in each.name]


def test_brought_folder_does_not_change_with_its_source(tmp_path: Path) -> None:
    source = tmp_path / "tool"
    source.mkdir()
    (source / "run").write_text("one")
    (source / "run").chmod(0o700)
    (source / "again").symlink_to("run")
    first = folder_of("folder", source)
    (source / "run").write_text("two")
    second = folder_of("folder", source)
    assert [(each / "run").read_text() for each in (first, second)] == ["one", "two"]
    assert (first / "again").readlink() == Path("run")
    assert stat.S_IMODE((first / "run").stat().st_mode) & 0o555 == 0o555, "the sandbox's user runs it"
    assert folder_of("folder", source) == second


@pytest.mark.parametrize("suffix", ["tgz", "zip"])
def test_archive_is_unpacked(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tool.{suffix}"
    if suffix == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            info = zipfile.ZipInfo("bin/run")
            info.external_attr = 0o100755 << 16
            archive.writestr(info, "x")
            archive.writestr("doc", "y")
    else:
        tar(path, {"bin/run": "x", "doc": "y"})
    folder = folder_of("archive", path, sha256(path))
    assert ((folder / "bin/run").read_text(), (folder / "doc").read_text()) == ("x", "y")
    assert os.access(folder / "bin/run", os.X_OK)


@pytest.mark.parametrize(
    ("members", "links"),
    [
        ({"../out": "x"}, {}),
        ({"/etc/out": "x", "../../out": "x"}, {}),
        ({}, {"out": "/etc/passwd"}),
        ({}, {"out": "../../../x"}),
    ],
)
def test_archive_with_paths_outside_leaves_nothing(
    tmp_path: Path, members: dict[str, str], links: dict[str, str]
) -> None:
    path = tar(tmp_path / "tool.tgz", {"good": "x", **members}, links)
    with pytest.raises(AgentMissing, match=r"program tool of the agent: .* cannot be unpacked") as raised:
        folder_of("archive", path)
    assert not raised.value.retryable
    assert left() == []
    assert not list(tmp_path.rglob("out"))


@pytest.mark.parametrize("broken", ["rubbish", "cut gz", "cut zip", "encrypted zip"])
def test_garbage_is_not_an_archive(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"rubbish")
    if broken in BROKEN_ARCHIVES:
        BROKEN_ARCHIVES[broken](tmp_path)
    with pytest.raises(AgentMissing, match=r"program tool of the agent: .*/a cannot be unpacked: .") as raised:
        folder_of("archive", path)
    assert not raised.value.retryable
    assert left() == []


def test_downloaded_archive_is_checked(tmp_path: Path) -> None:
    path = tar(tmp_path / "tool.tgz", {"run": "x"})
    paths = []

    async def answer(request: Request) -> Response:
        paths.append(request.url.path)
        return Response(path.read_bytes())

    with serving(Starlette(routes=[Route("/tool.tgz", answer)])) as url:
        for _ in range(2):
            assert (folder_of("archive", f"{url}/tool.tgz", sha256(path)) / "run").read_text() == "x"
        assert paths == ["/tool.tgz"], "it is downloaded once"
        with pytest.raises(AgentMissing, match=f"has the digest {sha256(path)}, not {'0' * 64}"):
            folder_of("archive", f"{url}/tool.tgz", "0" * 64)
    with pytest.raises(SandboxError, match="could not be fetched"):
        folder_of("archive", f"{url}/tool.tgz", "1" * 64)
    assert left() == []


@pytest.mark.parametrize("kind", ["npm", "folder", "archive"])
def test_another_digest_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "tool").mkdir()
    sources: dict[str, Callable[[Path], Path]] = {
        "npm": lock_in,
        "folder": lambda at: at / "tool",
        "archive": lambda at: tar(at / "t.tgz", {"run": "x"}),
    }
    source = sources[kind](tmp_path)
    with pytest.raises(AgentMissing, match=r"has the digest [0-9a-f]+, not 0{24}") as raised:
        folder_of(kind, source, "0" * 24)
    own = str(raised.value).partition("has the digest ")[2].partition(",")[0]
    assert folder_of(kind, source, own).is_dir()


@pytest.mark.parametrize("kind", ["npm", "folder", "archive"])
def test_missing_program_is_the_agents_fault(tmp_path: Path, kind: str) -> None:
    with pytest.raises(AgentMissing, match="cannot be read on this node") as raised:
        folder_of(kind, tmp_path / "none")
    assert not raised.value.retryable


def test_image_is_unpacked_completely(tmp_path: Path) -> None:
    root = root_folder(tmp_path / "image", ("bash",))
    folder = folder_of("image", root)
    assert (folder / "etc/mark").read_text() == "small image\n"
    assert (folder / "usr/bin/sh").readlink() == Path("bash")
    with pytest.raises(AgentMissing, match=r"has the digest [0-9a-f]{24}, not 0{24}") as raised:
        folder_of("image", root, "0" * 24)
    own = str(raised.value).partition("has the digest ")[2].partition(",")[0]
    assert folder_of("image", root, own) == folder


def test_image_that_cannot_be_unpacked_is_the_agents_fault(tmp_path: Path) -> None:
    root_folder(tmp_path / "bare", ("cat",))
    reasons = {
        "host": "is an image of several folders",
        str(tmp_path / "none"): "there is no",
        str(tmp_path / "bare"): "no.* bash",
    }
    for name, why in reasons.items():
        with pytest.raises(AgentMissing, match=f"program tool of the agent: .*{why}") as raised:
            folder_of("image", name)
        assert not raised.value.retryable


def test_two_programs_with_one_name_are_refused(tmp_path: Path) -> None:
    program = AgentProgram(name="tool", kind="folder", source=str(tmp_path / "a"))
    (tmp_path / "a").mkdir()
    with pytest.raises(AgentMissing, match="two programs of the agent are called 'tool'"):
        brought(sandbox_config(), [program, program])


def test_npm_packages_are_installed_without_running_scripts(tmp_path: Path) -> None:
    folder = folder_of("npm", lock_in(tmp_path))
    assert (folder / "node_modules/tiny/cli.js").read_text() == "//"
    assert (folder / "node_modules/.bin/tiny").resolve() == folder / "node_modules/tiny/cli.js"
    assert not list(folder.rglob("ran"))


def test_npm_package_with_another_digest_is_refused(tmp_path: Path) -> None:
    wrong = "sha512-" + base64.b64encode(b"0" * 64).decode()
    with pytest.raises(AgentMissing, match="EINTEGRITY") as raised:
        folder_of("npm", lock_in(tmp_path, wrong))
    assert not raised.value.retryable
    assert left() == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not a package-lock.json"),
        ("[]", "is not a package-lock.json"),
        ('{"packages": {"": {}}}', "names no package"),
        ('{"packages": {"": {}, "node_modules/x": {"version": "1"}}}', "has no digest of node_modules/x"),
        ('{"packages": {"": {}, "node_modules/x": {"resolved": "git+ssh://x", "link": true}}}', "has no digest of"),
        ('{"dependencies": {}}', "is not a package-lock.json"),
    ],
)
def test_lock_without_digests_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(AgentMissing, match=why):
        folder_of("npm", tmp_path / "x.json")


def slow_npm(folder: Path) -> dict[str, str]:
    """Return a PATH whose npm writes half a package, reports it, and waits to be released."""
    (folder / "bin").mkdir()
    script = (
        f'echo $$ >>"{folder}/started"; mkdir -p node_modules/half; while ! [ -e "{folder}/go" ]; do sleep 0.05; done\n'
    )
    for name in ("npm", "node"):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}")
        (folder / "bin" / name).chmod(0o755)
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}"}


def started(folder: Path) -> list[int]:
    until = time.monotonic() + 120
    while not (folder / "started").exists() or not (folder / "started").read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.02)
    return [int(line) for line in (folder / "started").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_killed_installation_leaves_nothing_partial(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    code = (
        "import sys; from farm.records.sandbox_spec import AgentProgram\n"
        "from testkit.scratch_folder import sandbox_config\n"
        "from workers.sandboxes.agent_programs.brought_programs import brought\n"
        "brought(sandbox_config(), [AgentProgram(name='tool', kind='npm', source=sys.argv[1])])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(lock)], env={**os.environ, **slow_npm(tmp_path)})
    (pid,) = started(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 120
    while alive(pid):
        assert time.monotonic() < until, "npm continues"
        time.sleep(0.02)
    folder = folder_of("npm", lock)
    assert [each.name for each in (folder / "node_modules").iterdir() if not each.name.startswith(".")] == ["tiny"]
    assert left() == []


def test_concurrent_requests_install_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_in(tmp_path)
    monkeypatch.setenv("PATH", slow_npm(tmp_path)["PATH"])
    began = threading.Barrier(4)

    def bring() -> Path:
        began.wait()
        return folder_of("npm", lock)

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(bring) for _ in range(4)]
        started(tmp_path)
        (tmp_path / "go").touch()
        folders = {each.result() for each in waiting}
    assert len(folders) == 1
    assert len(started(tmp_path)) == 1
