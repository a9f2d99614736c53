"""The cache of images: built once for concurrent users, complete or not at all, kept while in use; its commands."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from farm.errors import ImageError
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.contract.sandboxes.sandbox_kinds import processes_with, python
from tests.services.commands import output_of
from tests.services.farms import until
from tests.services.images import root_folder, sif_file
from tests.services.preloaded import completed, opened
from tests.services.servers.registry import registry
from tests.services.soak import ONLY
from workers.cli.images import main as images_main
from workers.config import SandboxConfig
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.content_store import use_mark
from workers.sandboxes.images.environments import interpreter_for
from workers.sandboxes.images.image import image
from workers.sandboxes.images.image_cache import CachedImage, cached_parts, entries
from workers.sandboxes.images.image_pruning import beyond, prune, unused_since
from workers.testing.plugin_path import python_path

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

UUID = "cat /proc/sys/kernel/random/uuid >/etc/built"
"""A command whose output differs in each build."""
BUILD = """
import sys
from testkit.scratch_folder import sandbox_config
from workers.sandboxes.images.image import image
print(image(sandbox_config(), sys.argv[1]).folder)
"""


@pytest.fixture(scope="module")
def place(sandbox_settings: None, open_folder: Path, apptainer: Path) -> Path:
    """Return the folder of this module's image definitions."""
    return open_folder


@pytest.fixture(scope="module")
def sif(place: Path, apptainer: Path) -> Path:
    return sif_file(apptainer, root_folder(place / "small"), place / "small.sif")


@pytest.fixture
def define(sif: Path, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return a function that writes a definition for this test, given its %post."""

    def write(post: str) -> Path:
        path = sif.with_name(f"{request.node.name}.def")
        path.write_text(f"# {request.node.name}\nBootstrap: localimage\nFrom: small.sif\n%post\n    {post}\n")
        return path

    return write


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for a build, which may be slow on a busy machine."""
    until(condition, what, deadline_s=60)


def built(path: Path) -> str:
    return (image(sandbox_config(), str(path)).folder / "etc/built").read_text()


def built_elsewhere(path: Path, **env: str) -> str:
    """Return the image that another process of the farm finds."""
    process = python(f"import sys; sys.argv = ['', {str(path)!r}]; {BUILD}", (), **env)
    folder, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return (Path(folder.strip()) / "etc/built").read_text()


def half_built() -> list[str]:
    """Return the temporary files that exist only during a build."""
    left = [str(path) for path in sandbox_config().images_folder.glob("*.new.*")]
    return left + [str(path) for at in ("", "images-*/") for path in settings().scratch.glob(f"{at}runtime/build-*")]


def seconds(n: int, tag: int) -> str:
    """Return a time to sleep that identifies this sleeper among all of the machine."""
    return f"{n}.{os.getpid()}{int(tag):02}"


def ended(sleeper: str) -> bool:
    """End the process that sleeps for a time, and return whether there was one."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cmdline").read_bytes() == f"sleep\0{sleeper}\0".encode():
                os.kill(int(entry.name), signal.SIGTERM)
                return True
    return False


def cached_names() -> set[str]:
    return {name for entry in entries(sandbox_config()) for name in entry.names}


def entry_of(path: Path) -> CachedImage:
    return next(entry for entry in entries(sandbox_config()) if str(path) in entry.names)


def use_long_ago() -> None:
    """Make all images look unused for an hour."""
    for mark in sandbox_config().images_folder.glob("*/used/*"):
        os.utime(mark, (time.time() - 3600, time.time() - 3600))


def test_concurrent_processes_build_an_image_once(sif: Path, config: SandboxConfig) -> None:
    with registry(sif.with_suffix("")) as (names, content):
        image(config, f"{names}/team/small:alone")
        processes = [
            python(
                f"import sys; sys.argv = ['', '{names}/team/small:four']; {BUILD}",
                FARM_SCRATCH=str(sif.parent / str(n)),
            )
            for n in range(4)
        ]
        folders = {process.communicate(timeout=600)[0] for process in processes}
        result = [path.rpartition("/")[2] for path in content.requested_paths]
    assert len(folders) == 1
    assert result.count("four") == result.count("alone") > 0


def test_changed_definition_is_another_image(define: Callable[[str], Path]) -> None:
    first = built(define(UUID))
    assert built(define(UUID)) == first, "written again, but the same"
    assert built(define(f"{UUID}; true")) != first
    assert built(define(UUID)) == first


def test_copied_files_are_part_of_the_image_key(define: Callable[[str], Path]) -> None:
    path = define(f"{UUID}\n%files\n    folder /opt/folder")
    folder = path.with_name("folder")
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/file").write_text("a")
    first = built(path)
    os.utime(folder / "deep/file", (1, 1))
    assert built(path) == first
    (folder / "deep/file").write_text("b")
    assert built(path) != first


def test_failure_is_cached_for_all_callers_until_a_retry(define: Callable[[str], Path], config: SandboxConfig) -> None:
    path = define("echo once >&2; cat /proc/sys/kernel/random/uuid; exit 1")
    messages = set()
    for _ in range(3):
        with pytest.raises(ImageError, match="once") as raised:
            image(config, str(path))
        messages.add(str(raised.value))
    assert len(messages) == 1, "built once"
    with pytest.raises(ImageError) as raised:
        image(config, str(path), retry=True)
    assert str(raised.value) not in messages


def test_transient_failure_is_retried_soon(define: Callable[[str], Path], config: SandboxConfig) -> None:
    path = define("cat /proc/sys/kernel/random/uuid; echo No space left on device; exit 1")
    messages = set()

    def fails_otherwise() -> bool:
        with pytest.raises(ImageError) as raised:
            image(config, str(path))
        assert raised.value.retryable
        messages.add(str(raised.value))
        return len(messages) == 2

    wait_until(fails_otherwise, "it is built once more")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=ONLY)])
def test_killed_build_leaves_nothing_and_is_repeated(define: Callable[[str], Path], number: signal.Signals) -> None:
    awaited, left = seconds(4711, number), seconds(4712, number)
    # leftovers of builds that other tests killed, until they are repeated or pruned
    before = half_built()
    path = define(f"{UUID}; setsid sleep {left} & sleep {awaited} || true")
    process = python(f"import sys; sys.argv = ['', {str(path)!r}]; {BUILD}")
    wait_until(lambda: processes_with(awaited) and processes_with(left), "it is built half")
    process.send_signal(number)
    process.communicate()
    wait_until(lambda: not processes_with(awaited) and not processes_with(left), "nothing runs any more")
    with ThreadPoolExecutor() as pool:
        again = pool.submit(built, path)
        wait_until(lambda: ended(awaited), "it is built half once more")
        assert again.result()
    assert set(half_built()) <= set(before)
    assert not processes_with(left), "nor what a build left running that came to its end"


def test_definition_edited_during_its_build_is_not_cached(define: Callable[[str], Path]) -> None:
    """A definition that is edited during its build is not cached under the old contents."""
    awaited = seconds(4711, 0)
    path = define(f"{UUID}; sleep {awaited} || true")
    process = python(f"import sys; sys.argv = ['', {str(path)!r}]; {BUILD}")
    wait_until(lambda: processes_with(awaited), "it is being built")
    define(UUID)
    assert ended(awaited)
    process.communicate()
    assert process.returncode != 0
    assert str(path) not in cached_names()


def test_scratch_mode_rebuilds_once_per_farm(define: Callable[[str], Path], config: SandboxConfig) -> None:
    path = define(UUID)
    first = built(path)
    assert built_elsewhere(path) == first
    second = built_elsewhere(path, FARM_IMAGE_CACHE="scratch")
    assert second != first
    assert built_elsewhere(path) == second, "and what it built is what the others find"
    began = str(time.time())
    third = built_elsewhere(path, FARM_IMAGE_CACHE="scratch", FARM_STARTED_AT=began)
    assert third != second
    assert built_elsewhere(path, FARM_IMAGE_CACHE="scratch", FARM_STARTED_AT=began) == third, "the same farm"
    assert prune(config, []) == []
    assert not list(config.images_folder.glob("*.old.*")), "nobody used the replaced ones"


def test_lock_mode_keeps_the_image_of_a_name(define: Callable[[str], Path], config: SandboxConfig) -> None:
    path = define(UUID)
    first = built_elsewhere(path, FARM_IMAGE_CACHE="lock")
    define(f"{UUID}; true")
    assert built_elsewhere(path, FARM_IMAGE_CACHE="lock") == first
    path.unlink()
    assert built_elsewhere(path, FARM_IMAGE_CACHE="lock") == first
    define(f"{UUID}; true")
    farm("build", str(path), "--mode", "lock")
    second = built_elsewhere(path, FARM_IMAGE_CACHE="lock")
    assert second != first
    use_long_ago()
    prune(config, entries(config))
    define(f"{UUID}; true; true")
    process = python(f"import sys; sys.argv = ['', {str(path)!r}]; {BUILD}", FARM_IMAGE_CACHE="lock")
    assert process.wait() != 0, "it is locked to what is gone"


def farm(*words: str, code: int = 0) -> str:
    """Return the output of `farm images`."""
    return output_of(images_main, *words, code=code)


def pulled(*words: str, env: Mapping[str, str], code: int = 0) -> str:
    """Return the output of `farm images pull`, run in a process with more plug-ins installed."""
    own = {**os.environ, "COLUMNS": "200", **env}
    done = completed("farm.cli.main", ["images", "pull", *words], own)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def pruned_parts() -> set[str]:
    """Prune all unused parts other than images; return the reasons for which some are kept."""
    config = sandbox_config()
    for each in cached_parts(config):
        os.utime(use_mark(each.folder), (1, 1))
    return {result.kept for result in prune(config, cached_parts(config))}


def test_pruning_keeps_images_in_use(start: Start, run: Run, sif: Path, config: SandboxConfig) -> None:
    """One of two images is in use by a sandbox."""
    use_long_ago()
    prune(config, entries(config))
    sandbox = start(image=str(sif))
    image(config, "host")
    assert {result.kept.split()[0] for result in prune(config, entries(config))} == {"used"}, "a moment ago"
    use_long_ago()
    value = {result.entry.names: result.kept for result in prune(config, entries(config))}
    assert value == {(str(sif),): "a sandbox uses it", ("host",): ""}
    assert "in use" in farm("list")
    # a system Python is bound unchanged
    has_environment = interpreter_for("")[1] != "/usr"
    assert ("a sandbox uses it" in pruned_parts()) is has_environment
    assert run(sandbox.exec(["rm", "-r", "/opt/data"], timeout_s=5)).code == 0
    run(sandbox.stop())
    assert [result.kept for result in prune(config, entries(config))] == [""]
    assert pruned_parts() <= {""}
    notes = {"pins", "built_instead"}
    assert [
        path for path in config.images_folder.iterdir() if path.name not in notes and path.suffix != ".failed"
    ] == []


def test_pruning_keeps_images_used_on_another_node(sif: Path, config: SandboxConfig) -> None:
    image(config, str(sif))
    entry = entry_of(sif)
    (entry.folder / "used/another").touch()
    use_long_ago()
    os.utime(entry.folder / "used/another")
    entry = entry_of(sif)
    assert prune(config, [entry])[0].kept.startswith("used on another")
    os.utime(entry.folder / "used/another", (0, 0))
    entry = entry_of(sif)
    assert prune(config, [entry])[0].kept == ""


def test_least_recently_used_images_are_pruned_first(
    sif: Path, define: Callable[[str], Path], config: SandboxConfig
) -> None:
    use_long_ago()
    prune(config, entries(config))
    image(config, str(sif))
    image(config, str(define(UUID)))
    older, newer = sorted(entries(config), key=lambda entry: entry.card.built_at)
    os.utime(older.folder / "used" / os.uname().nodename, (1, 1))
    assert [entry.card.key for entry in unused_since(config, time.time() - 60)] == [older.card.key]
    # environments of the sandboxes of other tests, which were used before the newer ones
    others = list(cached_parts(config))
    room = newer.card.n_bytes + sum(each.card.n_bytes for each in others)
    assert [entry.card.key for entry in beyond(config, room)] == [older.card.key]
    assert beyond(config, room + older.card.n_bytes) == []
    assert len(beyond(config, 0)) == 2 + len(others)


def test_image_commands_build_list_and_prune(sif: Path, define: Callable[[str], Path]) -> None:
    good = define(UUID)
    bad = good.with_name("bad.def")
    bad.write_text("Bootstrap: localimage\nFrom: small.sif\n%post\n    echo these are; echo the last words; exit 9\n")
    output = farm("build", str(good), str(bad), str(sif), "--jobs", "3", code=1)
    assert "3/3" in output
    assert output.count("ok ") == 2
    assert f"{bad}: image {bad} could not be built\n" in output
    assert "    the last words\n" in output.rpartition("could not be built")[2]
    listed = farm("list")
    assert str(good) in listed
    assert str(bad) not in listed
    assert "kept" not in farm("prune", "--older-than", "1d")
    assert f"gone: {good}" in farm("prune", "--keep-mb", "0", "--dry-run")
    assert str(good) in farm("list")
    use_long_ago()
    assert f"gone: {good}" in farm("prune", "--all")
    assert str(good) not in farm("list")


def test_invalid_options_are_refused(sif: Path) -> None:
    assert "give one of" in farm("prune", code=2)
    assert "is not a duration such as 30m, 12h or 7d" in farm("prune", "--older-than", "soon", code=2)
    assert "NAME=VALUE" in farm("build", "x.def.j2", "--value", "x", code=2)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"data_source": "code", "fields": {}}', "tasks.jsonl:2: task_id: Field required"),
        ("nonsense", "tasks.jsonl:2: not JSON"),
        ('{"data_source": "unheard", "fields": {}}', "UnknownHandler"),
    ],
)
def test_invalid_tasks_are_refused_with_their_line(sif: Path, line: str, complaint: str) -> None:
    tasks = sif.with_name("tasks.jsonl")
    tasks.write_text(f'{{"data_source": "noop", "fields": {{}}}}\n{line}\n')
    assert complaint in farm("pull", "--from", str(tasks), code=1)


HANDLER = """
from pydantic import BaseModel
from farm.records.request import SandboxSpec
from workers.plugins.handler import Handler

class PicturedInstance(BaseModel):
    image: str

class PicturedHandler(Handler):
    data_source, instance_type = "pictured", PicturedInstance

    def sandbox(self):
        return SandboxSpec(image=self.instance.image)

    def messages(self):
        return []

    def evaluator(self, models=None):
        raise NotImplementedError
"""


@pytest.fixture
def with_handler(place: Path) -> dict[str, str]:
    """Return the environment of a process for which another handler is installed."""
    site = place / "site"
    (site / "pictured-1.dist-info").mkdir(parents=True, exist_ok=True)
    (site / "pictured-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: pictured\nVersion: 1\n")
    (site / "pictured-1.dist-info/entry_points.txt").write_text(
        "[farm.handlers]\npictured = pictured:PicturedHandler\n"
    )
    (site / "pictured.py").write_text(HANDLER)
    return {"PYTHONPATH": python_path(site)}


PROGRAM = """
import asyncio, sys
from farm.errors import RolloutError
from workers.stages.stage_job import StageJob, resolve_problem
from workers.stages.stage_functions import init

async def init_error(number):
    job = StageJob(f"batch.{number}.0", 1, 0, "pictured", {"image": sys.argv[1]}, sandbox_kind="namespace")
    try:
        await init(resolve_problem(job))
    except RolloutError as error:
        rollout_id, _, text = str(error).partition(": ")
        assert rollout_id == f"batch.{number}.0", error
        return type(error).__name__, error.kind, error.retryable, text

async def main():
    for found in set(await asyncio.gather(*map(init_error, range(100)))):
        print(*found)

asyncio.run(main())
"""


def test_hundred_rollouts_fail_with_one_build_and_its_cause(
    define: Callable[[str], Path], with_handler: dict[str, str]
) -> None:
    path = define("cat /proc/sys/kernel/random/uuid; echo these are the last words; exit 1")
    process = python(f"import sys; sys.argv = ['', {str(path)!r}]\n{PROGRAM}", (), **with_handler)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    assert output.startswith(f"ImageError sandbox_error False image {path} could not be built: ")
    assert "these are the last words" in output
    assert output.count("\n") == 1, "it was built once, for all of them"


def test_pull_builds_the_images_of_all_tasks(
    sif: Path, define: Callable[[str], Path], with_handler: dict[str, str]
) -> None:
    """Ten instances use three images, one of them broken, and one instance needs none."""
    names = [str(sif), str(define(UUID)), str(sif.with_name("missing.sif"))]
    tasks = sif.with_name("tasks.jsonl")
    lines = [{"data_source": "pictured", "fields": {"image": name}} for name in names * 3]
    lines.append({"data_source": "noop", "fields": {}})
    tasks.write_text("\n".join(map(json.dumps, lines)))
    output = pulled("--from", str(tasks), code=1, env=with_handler)
    assert "3/3" in output
    assert output.count("ok ") == 2
    assert f"{names[2]}: there is no {names[2]} on this node" in output
    assert cached_names() >= {names[0], names[1]}
    lines = [line for line in lines if "missing" not in json.dumps(line)]
    tasks.write_text("\n".join(map(json.dumps, lines)))
    assert "2/2" in pulled("--from", str(tasks), env=with_handler)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=ONLY), signal.SIGKILL])
def test_interrupted_build_command_leaves_nothing(
    define: Callable[[str], Path], place: Path, number: signal.Signals
) -> None:
    first, second = seconds(4711, number), seconds(4712, number)
    path = define(f"{UUID}; setsid sleep {first} & sleep {second}")
    process = opened("farm.cli.main", ["images", "build", str(path)], os.environ)
    try:
        wait_until(lambda: processes_with(first) and processes_with(second), "it is being built")
    finally:
        process.send_signal(number)
        out, _ = process.communicate(timeout=600)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "unfinished builds are removed" in out
        assert half_built() == []
    wait_until(lambda: not processes_with(first) and not processes_with(second), "nothing runs any more")
    wait_until(lambda: not half_built(), "all is cleared away")
    assert str(path) not in cached_names()
