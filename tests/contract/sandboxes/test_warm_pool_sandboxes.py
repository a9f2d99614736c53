"""Sandboxes from the warm pool, of both kinds: their assignment, their expiry, and their complete removal."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from farm.records.request import SandboxLimits, SandboxSpec
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS, mounts_with, own_seconds, processes_with, python
from tests.contract.sandboxes.warm_pool_providers import StockedNamespace, StockedSingularity
from tests.services.farms import until
from workers.config import SandboxConfig
from workers.conformance.bench import PromiseBench, chosen
from workers.conformance.trial import NotTried, Promise
from workers.process.warm_pool_filler import WarmPoolDemand, WarmPoolFiller
from workers.sandboxes.launch_plan import prepare
from workers.sandboxes.lifecycle import warm_pool
from workers.sandboxes.lifecycle.reaper import sweep, sweep_all
from workers.sandboxes.lifecycle.state import SandboxRecord, folder, terminate, terminate_in
from workers.sandboxes.provider import NodeSandboxProvider

Run = Callable[[Any], Any]

STOCKED: dict[str, Callable[[], StockedNamespace | StockedSingularity]] = {
    "namespace": StockedNamespace,
    "singularity": StockedSingularity,
}
CLEAN = chosen(["isolation", "lifetime"])
STOCKER = """
import sys
from farm.records.request import SandboxSpec
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS
from workers.sandboxes.launch_plan import prepare
recipe = PROVIDERS[{kind!r}]().recipe(SandboxSpec())
recipe.fill_warm_pool(prepare(recipe.config, recipe.spec))
print("up", flush=True)
sys.stdin.read()
"""
TAKER = """
import asyncio, sys
from farm.records.request import SandboxSpec
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS
from workers.sandboxes.lifecycle import warm_pool
from workers.sandboxes.launch_plan import prepare
from workers.sandboxes.lifecycle.state import folder
recipe = PROVIDERS[{kind!r}]().recipe(SandboxSpec())
key = recipe.key(prepare(recipe.config, recipe.spec))
print("ready", flush=True)
sys.stdin.readline()
for number in range({n}):
    record = warm_pool.take(recipe.config, key, folder(recipe.config, f"{name}-{{number}}"))
    print(record.first.pid if record else 0, flush=True)
"""


@pytest.fixture(scope="module", params=STOCKED)
def provider(request: pytest.FixtureRequest, sandbox_settings: None) -> NodeSandboxProvider:
    if request.param == "singularity":
        request.getfixturevalue("apptainer")
    stocked_namespace = STOCKED[request.param]()
    if missing := stocked_namespace.missing():
        absent(missing)
    return stocked_namespace


@pytest.fixture(autouse=True)
def no_stock_is_left(sandbox_settings: None) -> Iterator[None]:
    # sandboxes used by other test files a moment ago would be kept in the pool
    config = sandbox_config()
    warm_pool.uses(config, -1)
    yield
    drop([path for path in config.sandboxes_folder.iterdir() if warm_pool.is_pooled(path)], 0.0)


def drop(paths: Iterable[Path], after_s: float) -> None:
    terminate_in(filter(None, [warm_pool.dropped(path, starting_s=after_s, idle_s=after_s) for path in paths]))


def fill_pool(provider: NodeSandboxProvider, n: int = 1, **fields: Any) -> list[Path]:
    spec = SandboxSpec(**fields)
    return [provider.recipe(spec).fill_warm_pool(prepare(sandbox_config(), spec)) for _ in range(n)]


def record_in(path: Path) -> SandboxRecord:
    record = SandboxRecord.load(path)
    assert record
    return record


def ready() -> set[Path]:
    return {path for paths in warm_pool.ready(sandbox_config()).values() for path in paths}


@pytest.mark.parametrize("promise", CLEAN, ids=[promise.name for promise in CLEAN])
def test_pooled_sandbox_is_as_clean_as_a_new_one(promise: Promise, bench: PromiseBench, run: Run) -> None:
    try:
        run(bench.hold(promise))
    except NotTried as why:
        absent(str(why))


def test_all_features_work_after_the_hand_over(provider: NodeSandboxProvider, run: Run, config: SandboxConfig) -> None:
    """Shell, kernel, sockets and the monitor's notices are found under the new name."""

    async def used() -> None:
        one = await provider.start("handed", SandboxSpec(env={"X": "mine"}, limits=SandboxLimits(memory_mb=128)))
        assert one.socket_folder == folder(config, "handed") / "sockets"
        shell, kernel = await one.open_shell(), await one.open_kernel()
        assert (await shell.run("echo $X; touch /run/farm/seen", 5)).output == "mine\n"
        assert (one.socket_folder / "seen").exists()
        assert (await kernel.run("6 * 7", 20)).output == "Out[1]: 42\n"
        hog = ["bash", "-c", "x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo ${#x}"]
        assert "memory" in (await one.exec(hog, timeout_s=30)).limit
        await shell.close()
        await kernel.close()
        await one.stop()

    run(used())
    assert not folder(config, "handed").exists()


def test_different_spec_has_its_own_pool(provider: NodeSandboxProvider, run: Run) -> None:
    (path,) = fill_pool(provider, workdir="/elsewhere")
    for fields in ({}, {"network": True}, {"limits": SandboxLimits(memory_mb=64)}):
        run(run_and_stop(provider, SandboxSpec(**fields)))
        assert ready() == {path}
    # these are set for each command
    run(run_and_stop(provider, SandboxSpec(workdir="/elsewhere", env={"A": "b"}, limits=SandboxLimits(cpu_s=5))))
    assert not ready()


async def run_and_stop(provider: NodeSandboxProvider, spec: SandboxSpec) -> None:
    sandbox = await PROVIDERS[provider.kind]().start("differs", spec)
    await sandbox.stop()


def test_pooled_sandbox_is_taken_once(
    provider: NodeSandboxProvider, sandbox_settings: None, config: SandboxConfig
) -> None:
    """Tested with two processes, and as many threads of this one, at the same time."""
    paths = fill_pool(provider, 6)
    made = {record_in(path).first.pid for path in paths}
    key = paths[0].name.split(".")[2]
    codes = [TAKER.format(kind=provider.kind, n=4, name=f"other-{number}") for number in range(2)]
    others = [python(code) for code in codes]
    for other in others:
        assert other.stdout
        assert other.stdout.readline() == "ready\n"
    taken: list[int] = []

    def take(number: int) -> None:
        if record := warm_pool.take(config, key, folder(config, f"thread-{number}")):
            taken.append(record.first.pid)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for other in others:
        assert other.stdin
        other.stdin.write("go\n")
        other.stdin.flush()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result = [int(line) for other in others for line in other.communicate()[0].split()]
    taken += [pid for pid in result if pid]
    assert sorted(taken) == sorted(made)
    sweep(config, keep=tuple, starting_s=0)


def test_dead_pooled_sandbox_is_not_handed_over(provider: NodeSandboxProvider, config: SandboxConfig) -> None:
    dead, orphaned, alive = fill_pool(provider, 3)
    pid = record_in(alive).first.pid
    os.kill(record_in(dead).monitor.pid, signal.SIGSTOP)
    os.kill(record_in(dead).first.pid, signal.SIGKILL)
    os.kill(record_in(orphaned).monitor.pid, signal.SIGKILL)
    ended = [record_in(path).first for path in (dead, orphaned)]
    until(lambda: not any(process.alive() for process in ended), "their first processes are gone")
    stopped = record_in(dead).monitor
    record = warm_pool.take(config, alive.name.split(".")[2], folder(config, "lucky"))
    assert record
    assert record.first.pid == pid
    assert record.sandbox_id == "lucky"
    terminate(record)
    os.kill(stopped.pid, signal.SIGCONT) if stopped.alive() else None
    drop(ready(), 100)
    assert not ready()


@pytest.mark.parametrize("stop", ["stop", "monitor", "first"])
def test_handed_over_sandbox_leaves_nothing(
    provider: NodeSandboxProvider, run: Run, stop: str, config: SandboxConfig
) -> None:
    sandbox_id = f"taken-{provider.kind}-{stop}"
    (path,) = fill_pool(provider)
    sandbox = run(PROVIDERS[provider.kind]().start(sandbox_id, SandboxSpec()))
    assert not ready()
    script = f"(setsid sleep {(seconds := own_seconds())} >/dev/null 2>&1 &); mkdir -p a/b; chmod 000 a"
    run(sandbox.exec(["bash", "-c", script], timeout_s=5))
    record = record_in(folder(config, sandbox_id))
    if stop == "stop":
        run(sandbox.stop())
    else:
        os.kill(record.monitor.pid if stop == "monitor" else record.first.pid, signal.SIGKILL)
        until(lambda: not processes_with(f"sleep\0{seconds}"), "no process is left")
        if stop == "monitor":
            others = {each.name for each in config.sandboxes_folder.iterdir()} - {sandbox_id}
            assert sweep(config, keep=lambda: others) == [sandbox_id]
    until(lambda: not folder(config, sandbox_id).exists(), "the folder is gone")
    for name in (sandbox_id, path.name):
        assert not mounts_with(name)
        assert not [line for line in processes_with(name) if "pytest" not in line]


def test_pool_ends_with_its_node_and_not_with_its_worker(provider: NodeSandboxProvider, run: Run) -> None:
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    code = STOCKER.format(kind=provider.kind)
    worker = python(code, FARM_LIFELINE_FD=str(read_end), pass_fds=(read_end,))
    assert worker.stdout
    assert worker.stdout.readline() == "up\n"
    worker.kill()
    worker.communicate()
    (path,) = ready()
    record = record_in(path)
    assert record.first.alive()
    os.close(write_end)
    until(lambda: not path.exists(), "the folder is gone")
    os.close(read_end)
    assert not record.first.alive()
    assert not mounts_with(path.name)


def test_sweep_keeps_the_pool_and_drops_old_sandboxes(provider: NodeSandboxProvider, config: SandboxConfig) -> None:
    new, old = fill_pool(provider, 2)
    record = record_in(old)
    os.utime(old, (0, 0))
    unfinished, half_dropped = (
        warm_pool.starting(config, "key"),
        config.sandboxes_folder / ".gone.x",
    )
    for path in (unfinished, half_dropped):
        path.mkdir()
    assert sweep(config, keep=lambda: {path.name for path in config.sandboxes_folder.iterdir()}) == []
    assert ready() == {new}
    assert unfinished.exists()
    assert not half_dropped.exists()
    assert not record.first.alive()
    os.utime(unfinished, (0, 0))
    sweep(config, keep=lambda: {path.name for path in config.sandboxes_folder.iterdir()})
    assert not unfinished.exists()
    sweep_all(config)
    assert list(config.sandboxes_folder.iterdir()) == []


def filler_of(provider: NodeSandboxProvider, wants: Sequence[WarmPoolDemand], **options: Any) -> WarmPoolFiller:
    return WarmPoolFiller(lambda limit: wants, settings().model_copy(update=options))


def filled(warm_pool_filler: WarmPoolFiller, n: int) -> None:
    def is_full() -> bool:
        warm_pool_filler.round()
        return len(ready()) == n

    until(is_full, f"there are {n} in stock")


def test_pool_is_filled_up_to_the_demand(provider: NodeSandboxProvider, config: SandboxConfig) -> None:
    one, two = (provider.recipe(SandboxSpec(workdir=f"/{name}")) for name in ("one", "two"))
    warm_pool_filler = filler_of(
        provider, [WarmPoolDemand(one, 2), WarmPoolDemand(two, 9)], warm_pool=3, warm_pool_total=4, warm_pool_starts=2
    )
    filled(warm_pool_filler, 4)
    for _ in range(3):
        warm_pool_filler.round()
    result = {key: len(paths) for key, paths in warm_pool.ready(config).items()}
    assert result == {one.key(prepare(config, one.spec)): 2, two.key(prepare(config, two.spec)): 2}


def test_pooled_sandboxes_without_demand_are_replaced(provider: NodeSandboxProvider) -> None:
    old = set(fill_pool(provider, 3, workdir="/old"))
    wants = [WarmPoolDemand(provider.recipe(SandboxSpec(workdir="/new")), 2)]
    warm_pool_filler = filler_of(provider, wants, warm_pool=8, warm_pool_total=4, warm_pool_starts=1)
    filled(warm_pool_filler, 4)
    assert len(ready() & old) == 2


def test_pooled_sandboxes_with_demand_do_not_expire(provider: NodeSandboxProvider, config: SandboxConfig) -> None:
    (path,) = fill_pool(provider)
    os.utime(path, (0, 0))
    filler_of(provider, [WarmPoolDemand(provider.recipe(SandboxSpec()), 1)]).round()
    sweep(config, keep=lambda: {path.name for path in config.sandboxes_folder.iterdir()})
    assert ready() == {path}


def test_failing_demand_does_not_affect_others(provider: NodeSandboxProvider, caplog: pytest.LogCaptureFixture) -> None:
    broken = provider.recipe(SandboxSpec(image="/no/such/image"))
    fine = provider.recipe(SandboxSpec())
    filled(filler_of(provider, [WarmPoolDemand(broken, 3), WarmPoolDemand(fine, 1)]), 1)


def test_stopped_filler_starts_nothing(provider: NodeSandboxProvider, config: SandboxConfig) -> None:
    warm_pool_filler = filler_of(provider, [WarmPoolDemand(provider.recipe(SandboxSpec()), 1)])
    warm_pool_filler.stop()
    warm_pool_filler.round()
    assert not [path for path in config.sandboxes_folder.iterdir() if warm_pool.is_pooled(path)]


def test_recently_used_specs_stay_in_the_pool(
    provider: NodeSandboxProvider, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()
    monkeypatch.setenv("FARM_LIFELINE_FD", str(read_end))
    settings.cache_clear()
    try:
        spec = SandboxSpec(workdir="/used", env={"SECRET": "of one rollout"})
        sandbox = run(PROVIDERS[provider.kind]().start("user", spec))
        run(sandbox.stop())
        assert [use.spec for use in warm_pool.uses(sandbox_config(), 60)] == [spec.model_copy(update={"env": {}})]
        filled(filler_of(provider, [], warm_pool_starts=2), 2)
        sweep_all(sandbox_config())
        assert warm_pool.uses(sandbox_config(), -1) == warm_pool.uses(sandbox_config(), 60) == []
    finally:
        os.close(write_end)
        os.close(read_end)
        monkeypatch.undo()
        settings.cache_clear()


def test_disabled_pool_is_neither_used_nor_filled(
    provider: NodeSandboxProvider, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = fill_pool(provider)
    monkeypatch.setenv("FARM_WARM_POOL", "0")
    settings.cache_clear()
    try:
        run(run_and_stop(provider, SandboxSpec()))
        filler_of(provider, [WarmPoolDemand(provider.recipe(SandboxSpec()), 2)]).round()
        assert ready() == {path}
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_empty_pool_starts_new_sandboxes(provider: NodeSandboxProvider, run: Run, config: SandboxConfig) -> None:
    """A request that finds the pool empty starts a sandbox."""
    fill_pool(provider, 4)
    plain = PROVIDERS[provider.kind]()

    async def all_of_them() -> None:
        started = await asyncio.gather(*(plain.start(f"crowd-{number}", SandboxSpec()) for number in range(24)))
        value = await asyncio.gather(*(one.exec(["cat", "/proc/1/comm"], timeout_s=30) for one in started))
        assert {result.stdout for result in value} == {b"bash\n"}
        await asyncio.gather(*(one.stop() for one in started))

    run(all_of_them())
    assert not [path for path in config.sandboxes_folder.iterdir() if path.name.startswith(("crowd-", "."))]
