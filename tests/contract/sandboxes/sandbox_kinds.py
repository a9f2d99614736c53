"""The kinds of sandbox under test, and the folders of the tests."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from farm.home import own_home
from farm.settings import settings
from tests.services.preloaded import opened
from workers.plugins.interfaces import SandboxProvider
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.singularity import SingularityProvider
from workers.testing.fakes import FakeProvider
from workers.testing.local_sandbox import LocalProvider

PROVIDERS: dict[str, Callable[[], SandboxProvider]] = {
    "namespace": NamespaceProvider,
    "singularity": SingularityProvider,
}
FAKES: dict[str, Callable[[], SandboxProvider]] = {"local": LocalProvider, "fake": FakeProvider}
"""These keep the promises of the group `surface`; the last, in which no program runs, only those of files."""

ABOVE_THE_KIND = (
    "kernel/test_sandbox_ipython.py",
    "test_image_links.py",
    *(f"test_sandbox_{name}.py" for name in ("shell", "terminal", "tools")),
)
"""Files about code that all of our kinds share, which `make test` runs on the first kind and a soak on each."""
ABOVE_THE_KIND_PROMISES = (
    *("many_sandboxes_answer", "one_sandbox_does_not_starve_others", "shells_of_many_sandboxes_run_concurrently"),
    *("shell_survives_the_memory_limit", "kernel_survives_the_memory_limit", "dead_kernel_is_restarted"),
    *(
        "shell_survives_a_fork_bomb",
        "memory_limit_ends_many_small_programs",
        "memory_cannot_be_hidden",
        "processes_are_counted",
    ),
    *("socket_buffers_are_counted", "cpu_time_is_counted", "files_are_counted", "many_small_files_count_as_disk"),
    *("allocated_disk_is_counted", "open_removed_files_are_counted", "a_large_tree_can_be_copied_and_removed"),
    *("many_small_files_are_copied_at_once", "exchanged_links_do_not_lead_outside", "endless_output_is_ended"),
    *("commands_run_concurrently", "tools_survive_a_lack_of_descriptors", "a_cancelled_copy_ends_at_once"),
    *("sandboxes_start_while_others_stop", "sandbox_is_found_from_another_process", "kernel_survives_a_time_limit"),
    *(
        "a_shell_is_not_lost",
        "a_huge_file_is_refused",
        "a_file_too_big_for_the_node_is_refused",
        "file_size_is_counted",
    ),
    *("holes_of_files_are_not_counted", "a_command_can_have_lower_limits", "an_archive_with_owners_unpacks"),
    *("id_can_be_reused", "any_file_name_is_accepted"),
)
"""Promises with the same property, among those that take longest."""
ABOVE_THE_KIND_TESTS = (
    # the warm pool's hand-over; a promise of each kind tests that a new sandbox is clean
    *("test_pooled_sandbox_is_as_clean_as_a_new_one", "test_empty_pool_starts_new_sandboxes"),
    # the first of them tests which back end ends a cell
    *(
        "test_many_kernels_run_at_once",
        "test_close_ends_processes_of_cells",
        "test_images_are_bounded",
        "test_random_state_is_not_shared",
    ),
)
"""Tests of files on both."""

SANDBOX_IDS = "1879100000:60000"
"""Unassigned user ids; tests of a lack of them set others."""


@contextmanager
def farm_in(folder: Path) -> Iterator[None]:
    """Set the farm's home and scratch to subfolders, for this process and its children."""
    new = {"FARM_HOME": str(folder / "home"), "FARM_SCRATCH": str(folder / "scratch"), "FARM_SANDBOX_IDS": SANDBOX_IDS}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    settings.cache_clear()
    # a thread that was reading the environment just now may have cached it
    while settings().home != folder / "home":
        settings.cache_clear()
    # as every farm makes its own: the sandboxes' user cannot enter it
    own_home(folder / "home")
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        settings.cache_clear()


def own_seconds() -> str:
    """Return a unique time to sleep, which identifies a sleeper on the machine, even among those of other test runs."""
    return f"4711.{os.getpid()}{time.monotonic_ns()}"


def processes_with(text: str) -> list[str]:
    """Return the command lines of living processes of this machine that contain a text.

    Processes in uninterruptible sleep are left out: reading theirs may block as long as they sleep.
    """
    result = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or (entry / "stat").read_text().rpartition(")")[2].split()[0] == "D":
                continue
            if text.encode() in (line := (entry / "cmdline").read_bytes()):
                result.append(line.replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return result


def mounts_with(text: str) -> list[str]:
    """Return the mounts of this machine that contain a text."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if text in line]


def python(code: str, pass_fds: Sequence[int] = (), **env: str) -> subprocess.Popen[str]:
    """Start another process of this farm that runs some code."""
    return opened("-c", [code], {**os.environ, **env}, pass_fds=pass_fds)
