"""The scratch folder, small image and conditions of a sandbox benchmark.

The caches of images and Python environments stay in FARM_HOME, so a second run prepares nothing.
"""

from __future__ import annotations

import os
import platform
import pwd
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farm.settings import settings
from workers.config import SandboxConfig
from workers.sandboxes.images import runtime
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.sandbox_user import drop_privileges, give, sandbox_user

PROGRAMS = ("bash", "cat", "echo", "env", "ls", "mkdir", "rm", "sed", "sh", "sleep", "true")


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield an empty scratch folder for the farm in this process and its children, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="farm-benchmark-"))
    # sandboxes started by root run as an ordinary user, who must be able to enter
    folder.chmod(0o755)
    before = os.environ.get("FARM_SCRATCH")
    os.environ["FARM_SCRATCH"] = str(folder)
    settings.cache_clear()
    _allow_descriptors()
    try:
        yield folder
    finally:
        os.environ.pop("FARM_SCRATCH")
        if before is not None:
            os.environ["FARM_SCRATCH"] = before
        settings.cache_clear()
        remove(folder)


def sandbox_config() -> SandboxConfig:
    """Return the configuration of sandboxes by the settings that this process has now."""
    return SandboxConfig.of(settings())


def _allow_descriptors() -> None:
    """Raise the limit of descriptors: 200 shells need more than the 1,024 of a login."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def conditions() -> str:
    """Return the user, versions, cores and load of this run, for the report's title."""
    config = sandbox_config()
    user = sandbox_user(config.user)
    name = pwd.getpwuid(user[0] if user else os.getuid()).pw_name
    who = f"user {name}, started by root" if user else f"user {name}"
    load = os.getloadavg()[0]
    return (
        f"{who}; {runtime.version(config)}; Linux {platform.release()}; Python {platform.python_version()}; "
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} before"
    )


def small_image() -> Path:
    """Return a .sif with bash and a few programs, built from this machine's own without a network.

    Cached in FARM_HOME.
    """
    image = settings().cache / "benchmarks" / "small.sif"
    if not image.exists():
        image.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=settings().scratch) as name:
            folder = Path(name)
            folder.chmod(0o755)
            _fill(folder / "root")
            give(folder, sandbox_config().user)
            _build(folder)
            shutil.copy(folder / "small.sif", image.with_suffix(".new"))
            image.with_suffix(".new").rename(image)
    return image


def _fill(root: Path) -> None:
    for folder in ("usr/bin", "usr/share/doc", "etc", "tmp", "root"):
        (root / folder).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for program in PROGRAMS:
        source = shutil.which(program)
        assert source, f"this machine has no {program}"
        shutil.copy(source, root / "usr/bin" / program)
        listed = subprocess.run(["ldd", source], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(?:=> |\t)(/[^ ]*) \(", listed):
            target = root / "usr" / library.removeprefix("/usr").lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)


def _build(folder: Path) -> None:
    config = sandbox_config()
    drop = drop_privileges(config.user) if sandbox_user(config.user) else ()
    command = [*drop, str(runtime.program(config)), "build", str(folder / "small.sif"), str(folder / "root")]
    env = dict.fromkeys(("HOME", "APPTAINER_TMPDIR", "APPTAINER_CACHEDIR"), str(folder))
    done = subprocess.run(command, env=env | {"PATH": _search_path()}, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the image of the benchmark could not be built: {done.stderr[-500:]}")


def _search_path() -> str:
    """Return the runtime's folder, and the folder where `mksquashfs` may be."""
    return ":".join([str(Path(str(runtime.program(sandbox_config()))).parent), os.defpath, "/usr/sbin", "/sbin"])
