"""Promises of a root file system, on images of every format, and with the writable layer in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farm.settings import settings
from tests.contract.conftest import provider_of
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS
from tests.services.images import docker_archive, oci_archive, root_folder, sif_file
from tests.services.soak import at_length
from workers.conformance.bench import PromiseBench, chosen
from workers.conformance.trial import Promise
from workers.plugins.interfaces import SandboxProvider

Run = Callable[[Any], Any]
PROGRAMS = (
    *("bash", "cat", "chgrp", "chmod", "chown", "cksum", "cmp", "cp", "cut", "df", "grep", "head", "id", "install"),
    *("ln", "ls", "mkdir", "mv", "readlink", "rm", "rmdir", "sed", "sort", "stat", "sync", "tail", "tar", "touch"),
    *("tr", "uniq", "wc"),
)
FORMS = ("folder", "sif", "docker-archive", "oci-archive")
OF_THE_IMAGE = (
    *("image_folders_can_*", "image_files_can_*", "packages_can_be_replaced", "removed_files_stay_removed"),
    *("the_image_is_not_changed",),
)
"""The promises about the contents of an image."""
ON_DISK = {"changed_files_are_on_disk"}
ON_THE_HOST = {"forbidden_changes_are_reported"}
TMPFS_MB = 300
EACH = [(kind, form) for kind in PROVIDERS for form in FORMS[:2]]
WHOLE = at_length(list(zip(PROVIDERS, FORMS[:2], strict=True)), EACH)
PACKED = [
    *at_length([], [each for each in EACH if each not in WHOLE]),
    *zip(PROVIDERS, FORMS[2:], strict=True),
]
"""All formats are converted to folders before any kind of sandbox sees them, so each is tried with one kind."""


def promises(without: set[str]) -> list[Promise]:
    """Return the promises that can be checked on an image with few programs."""
    result = chosen(["root_file_system"])
    assert without < {promise.name for promise in result}
    return [promise for promise in result if promise.name not in without and set(promise.needs) <= set(PROGRAMS)]


@pytest.fixture(scope="module")
def root(open_folder: Path) -> Path:
    return root_folder(open_folder / "root", PROGRAMS)


@pytest.fixture(scope="module")
def images(root: Path, apptainer: Path) -> dict[str, str]:
    """Return the same root file system in every format."""
    folder = root.parent
    sif_file(apptainer, root, folder / "root.sif")
    docker = docker_archive(root, folder / "root-docker.tar")
    oci = oci_archive(root, folder / "root-oci.tar")
    names = (root, folder / "root.sif", f"docker-archive:{docker}", f"oci-archive:{oci}")
    return {form: str(name) for form, name in zip(FORMS, names, strict=True)}


@pytest.fixture(scope="module")
def image_bench(
    request: pytest.FixtureRequest, sandbox_settings: None, images: dict[str, str], run: Run
) -> Iterator[PromiseBench]:
    """Yield a bench of a kind of sandbox with the image in a format."""
    kind, form = request.param
    bench = PromiseBench(provider_of(kind, request), image=images[form])
    yield bench
    run(bench.aclose())


@pytest.mark.soak
@pytest.mark.parametrize("promise", promises(ON_THE_HOST), ids=lambda promise: promise.name)
@pytest.mark.parametrize("image_bench", WHOLE, indirect=True, ids="-".join)
def test_promise(promise: Promise, image_bench: PromiseBench, run: Run) -> None:
    run(image_bench.hold(promise))


@pytest.mark.soak
@pytest.mark.parametrize("promise", chosen(only=OF_THE_IMAGE), ids=lambda promise: promise.name)
@pytest.mark.parametrize("image_bench", PACKED, indirect=True, ids="-".join)
def test_promise_of_packed_images(promise: Promise, image_bench: PromiseBench, run: Run) -> None:
    run(image_bench.hold(promise))


@pytest.fixture(scope="module")
def memory_bench(provider: SandboxProvider, run: Run, sandbox_settings: None) -> Iterator[PromiseBench]:
    """Yield a bench of sandboxes whose scratch folder is on a tmpfs."""
    place = Path("/dev/shm")
    status = os.statvfs(place)
    if status.f_bavail * status.f_frsize < TMPFS_MB << 20 or status.f_flag & os.ST_NOEXEC:
        pytest.skip(f"{place} is too small, or does not run programs")
    scratch = tempfile.mkdtemp(dir=place, prefix="farm-test-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARM_SCRATCH", scratch)
        Path(scratch).chmod(0o755)
        settings.cache_clear()
        bench = PromiseBench(provider)
        yield bench
        run(bench.aclose())
    settings.cache_clear()
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.parametrize("promise", promises(ON_DISK), ids=lambda promise: promise.name)
def test_promise_in_memory(promise: Promise, memory_bench: PromiseBench, run: Run) -> None:
    run(memory_bench.hold(promise))
