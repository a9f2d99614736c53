"""Images of Dockerfiles: built cold, with one line changed, from the cache, and eight at once; compared with buildah.

The context has two stages and copied files; its base is one root file system, for both builders. Cold means without any
layer, but with the base. buildah keeps its own layers (`--layers`), in a store that already has the base; where it is
not installed, or cannot run, its column says why.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from farm.records.request import SandboxSpec
from farm.settings import settings
from testkit.report import Report, options
from testkit.scratch_folder import sandbox_config
from workers.sandboxes.images.image import image, set_alias
from workers.sandboxes.launch_plan import start_build
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.remove_tree import remove

NAME = "bench/system:1"
N_AT_ONCE = 8
"""Concurrent builds, of different contexts and of one."""
DOCKERFILE = """\
FROM bench/system:1 AS build
ARG VERSION=2
WORKDIR /src
COPY files/ .
RUN mkdir -p /out && cat f-* | sort > /out/all && \\
    echo "$VERSION" > /out/VERSION
RUN echo {marker} > /out/marker

FROM bench/system:1
COPY --from=build /out/ /opt/tool/
RUN ["touch", "/opt/exec-form"]
ENV PATH=/opt/tool:$PATH
WORKDIR /work
CMD ["bash"]
"""
N_FILES = 200

Build = Callable[[Path], None]


def main() -> None:
    arguments = options(__doc__)
    n = 2 if arguments.quick else 5
    report = Report("images of Dockerfiles, without an engine and without root")
    with tempfile.TemporaryDirectory(prefix="farm-images-") as name:
        place = Path(name)
        place.chmod(0o755)
        os.environ |= {"FARM_HOME": str(place / "home"), "FARM_SCRATCH": str(place / "scratch")}
        settings.cache_clear()
        base = base_folder(place / "base")
        set_alias(sandbox_config(), NAME, str(base))
        image(sandbox_config(), NAME)
        missing = buildah_missing()
        peer = None if missing else Buildah(place / "buildah", base)
        try:
            measure(report, place, own_build, peer, n)
        finally:
            remove(place / "buildah")
            remove(place / "scratch")
            remove(place / "home")
            remove(place / "base")
    if missing:
        report.title += f" (buildah: -, {missing})"
    report.show(arguments.json)


def base_folder(folder: Path) -> Path:
    """Make a root file system from this system's shell, core programs and libraries."""
    for name in ("usr/bin", "etc", "tmp", "opt", "var/tmp", "root"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    for program in ("bash", "cat", "chmod", "mkdir", "sort", "touch"):
        found = shutil.which(program)
        assert found
        shutil.copy(found, folder / "usr/bin" / program)
        listed = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        for word in listed.split():
            if word.startswith("/") and Path(word).exists():
                target = folder / "usr" / word.removeprefix("/usr").lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, target)
    (folder / "usr/bin/sh").symlink_to("bash")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (folder / "etc/group").write_text("root:x:0:\n")
    return folder


def write_context(folder: Path, marker: str) -> Path:
    """Write a build context with the marker as a line in the middle."""
    (folder / "files").mkdir(parents=True, exist_ok=True)
    for number in range(N_FILES):
        (folder / f"files/f-{number}").write_text(f"{folder.name} {number}\n" * 20)
    (folder / "Dockerfile").write_text(DOCKERFILE.format(marker=marker))
    return folder


def own_build(folder: Path) -> None:
    config = sandbox_config()
    image(config, f"dockerfile:{folder}", start=partial(start_build, config))


class Buildah:
    """The same builds by buildah, keeping each layer, in a store that has the base."""

    def __init__(self, place: Path, base: Path) -> None:
        place.mkdir()
        self._store = ["--root", str(place / "store"), "--runroot", str(place / "run"), "--storage-driver", "vfs"]
        container = self._run("from", "scratch").split()[-1]
        self._run("add", "--quiet", container, str(base), "/")
        self._run("commit", "--quiet", "--rm", container, NAME)

    def build(self, folder: Path) -> None:
        """Build a context; raises CalledProcessError."""
        self._run(*("build", "--layers", "--isolation", "chroot", "--pull=never"), str(folder))

    def _run(self, *words: str) -> str:
        done = subprocess.run(["buildah", *self._store, *words], capture_output=True, text=True, check=True)
        return done.stdout


def buildah_missing() -> str:
    """Return why buildah cannot be measured here; empty if it can."""
    if shutil.which("buildah") is None:
        return "not installed"
    done = subprocess.run(["buildah", "--version"], capture_output=True, text=True, check=False)
    return done.stderr.strip()[-100:] if done.returncode else ""


def measure(report: Report, place: Path, own: Build, peer: Buildah | None, n: int) -> None:
    """Measure each case on both builders, in turn."""
    names = ("cold", "one line changed", "cached")
    ours = {name: list[float]() for name in names}
    peers = {name: list[float]() for name in names}
    for number in range(n):
        folder = place / f"context-{number}"
        for times, build in ((ours, own), *([(peers, peer.build)] if peer else [])):
            write_context(folder, "one")
            times["cold"].append(seconds(build, [folder]))
            write_context(folder, "two")
            times["one line changed"].append(seconds(build, [folder]))
            times["cached"].append(seconds(build, [folder]))
    for name in names:
        against = {"buildah_ms": 1000 * sorted(peers[name])[n // 2]} if peer else {}
        report.times(f"build, {name}", ours[name], **against)
    at_once(report, place, own, peer)
    report.times("sandbox ready on it", asyncio.run(starts(place / "context-0", n)))


def at_once(report: Report, place: Path, own: Build, peer: Buildah | None) -> None:
    """Measure eight concurrent builds of different contexts, and eight requests for one."""
    folders = [write_context(place / f"many-{number}", "one") for number in range(N_AT_ONCE)]
    ours = seconds(own, folders)
    against = {"buildah_s": seconds(peer.build, folders)} if peer else {}
    report.add(f"build, {N_AT_ONCE} at once", ours, "s", **against)
    same = write_context(place / "same", "one")
    ours = seconds(own, [same] * N_AT_ONCE)
    against = {"buildah_s": seconds(peer.build, [same] * N_AT_ONCE)} if peer else {}
    report.add(f"build, one context {N_AT_ONCE} times at once", ours, "s", **against)


def seconds(build: Build, folders: Sequence[Path]) -> float:
    """Return the seconds that concurrent builds of all of them take."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(folders)) as threads:
        list(threads.map(build, folders))
    return time.perf_counter() - started


async def starts(folder: Path, n: int) -> list[float]:
    """Return the seconds until sandboxes on a built image are ready, without a warm pool."""
    os.environ["FARM_WARM_POOL"] = "0"
    settings.cache_clear()
    provider, times = NamespaceProvider(), []
    spec = SandboxSpec(image=f"dockerfile:{folder}", workdir="")
    for number in range(n + 1):
        started = time.perf_counter()
        sandbox = await provider.start(f"bench-{number}", spec)
        times.append(time.perf_counter() - started)
        await sandbox.stop()
    # the first start prepares what all sandboxes need
    return times[1:]


if __name__ == "__main__":
    main()
