"""The promises themselves: each must be able to fail, without side effects, and without breaking the next one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from farm.cli.main import main as farm
from farm.records.request import SandboxSpec
from tests.conftest import absent
from tests.services.farms import until
from workers.conformance.__main__ import main
from workers.conformance.bench import PROMISES, PromiseBench, PromiseResult, PromiseState, chosen
from workers.conformance.outside import files_with, left_of
from workers.conformance.trial import GREETING, PromiseTrial
from workers.plugins.interfaces import ExecResult, Sandbox
from workers.sandboxes.namespace import NamespaceProvider
from workers.testing.local_sandbox import LocalProvider

Run = Callable[[Any], Any]
LOCAL = "workers.testing.local_sandbox:LocalProvider"


class Saboteur:
    """A sandbox of another provider with some broken methods."""

    def __init__(self, sandbox: Any, **methods: Callable[..., Any]) -> None:
        self._sandbox = sandbox
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return lambda *args, **more: self._methods[name](self._sandbox, *args, **more)
        return getattr(self._sandbox, name)


class Sabotage(NamespaceProvider):
    """Starts real sandboxes and returns saboteurs."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        super().__init__()
        self._methods = methods
        self.started: list[Sandbox] = []

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> Any:
        self.started.append(await super().start(sandbox_id, spec))
        return Saboteur(self.started[-1], **self._methods)


async def lends_the_environment(sandbox: Any, argv: Any, *, env: Mapping[str, str] | None = None, **more: Any) -> Any:
    return await sandbox.exec(argv, env={**os.environ, **(env or {})}, **more)


async def forgets_the_time(sandbox: Any, argv: Any, *, timeout_s: float, **more: Any) -> Any:
    return await sandbox.exec(argv, timeout_s=timeout_s + 1000, **more)


async def hides_failures(sandbox: Any, argv: Any, **more: Any) -> Any:
    result = await sandbox.exec(argv, **more)
    return ExecResult(0, result.stdout, result.stderr)


async def reads_on_the_node(sandbox: Any, path: str) -> bytes:
    try:
        return Path(path).read_bytes()  # noqa: ASYNC240
    except OSError:
        return bytes(await sandbox.read_file(path))


async def does_nothing(sandbox: Any, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def namespaces() -> None:
    if missing := NamespaceProvider().missing():
        absent(missing)


@contextlib.contextmanager
def sabotage(run: Run, **methods: Callable[..., Any]) -> Iterator[PromiseBench]:
    provider = Sabotage(**methods)
    try:
        yield PromiseBench(provider)
    finally:
        for sandbox in provider.started:
            run(sandbox.stop())


def result_of(run: Run, bench: PromiseBench, name: str) -> PromiseResult:
    promise, *others = chosen(only=[name])
    assert not others
    result = run(bench.judge(promise))
    assert isinstance(result, PromiseResult)
    return result


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("method", "fault", "promise", "reason"),
    [
        ("exec", lends_the_environment, "worker_secrets_are_not_visible", "secret can be read inside"),
        ("exec", hides_failures, "streams_and_exit_code_are_separate", "should be (3, "),
        ("exec", hides_failures, "file_size_is_counted", "the exit code is 0"),
        ("read_file", reads_on_the_node, "paths_do_not_lead_outside", "ToolError should have been raised"),
        ("write_file", does_nothing, "written_data_is_read_back", "No such file"),
        ("stop", does_nothing, "stop_leaves_nothing", "there is left: "),
        ("stop", does_nothing, "id_can_be_reused", "SandboxError"),
    ],
)
def test_broken_promise_is_detected(
    method: str, fault: Callable[..., Any], promise: str, reason: str, run: Run
) -> None:
    with sabotage(run, **{method: fault}) as bench:
        promise_result = result_of(run, bench, promise)
    assert (promise_result.state, reason in promise_result.reason) == (PromiseState.BROKEN, True), promise_result.reason


@pytest.mark.usefixtures("namespaces")
def test_promise_has_a_time_limit(run: Run) -> None:
    slow = next(promise for promise in PROMISES if promise.name == "time_limit_returns_the_output_so_far")
    with sabotage(run, exec=forgets_the_time) as bench:
        result = run(bench.judge(type(slow)(slow.name, slow.group, slow.statement, slow.check, time_s=1.0)))
    assert result.reason == "it should be done within 1 s, and was not"


@pytest.mark.usefixtures("namespaces")
def test_sandbox_ended_by_a_promise_is_replaced(run: Run) -> None:
    async def end(trial: PromiseTrial) -> None:
        """End the shared sandbox and fail."""
        await trial.sandbox.stop()
        raise AssertionError("it is gone")

    bench = PromiseBench(NamespaceProvider())
    last = chosen(only=["streams_and_exit_code_are_separate"])[0]
    first = run(bench.shared())
    assert run(bench.judge(type(last)("end", "test", "", end))).reason == "it is gone"
    assert run(bench.judge(last)).state is PromiseState.KEPT
    assert run(bench.shared()).sandbox_id != first.sandbox_id
    run(bench.aclose())


@pytest.mark.parametrize(
    "name",
    [
        *("home_and_tmp_of_the_node_are_hidden", "namespaces_are_separate", "processes_of_the_node_are_hidden"),
        *("shared_memory_is_separate", "there_is_no_network", "abstract_sockets_of_the_node_are_unreachable"),
        *("sandboxes_cannot_connect_to_each_other", "sandboxes_do_not_see_each_other"),
        *("open_files_are_counted", "file_size_is_counted", "a_command_can_have_lower_limits"),
    ],
)
def test_missing_isolation_is_detected(name: str, run: Run, tmp_path: Path) -> None:
    """Run, without the guard of a bench, on a folder of this machine: the promises do no harm there, and must fail."""

    async def tried() -> None:
        provider = LocalProvider()
        shared = await provider.start("shared", SandboxSpec(env=GREETING))
        trial = PromiseTrial(provider, shared, tmp_path, {})
        try:
            await chosen(only=[name])[0].check(trial)
        finally:
            await trial.close()
            await shared.stop()

    with pytest.raises(AssertionError):
        run(tried())


def test_dangerous_promises_are_not_tried_on_the_node(run: Run) -> None:
    bench = PromiseBench(LocalProvider())
    for promise in PROMISES:
        if not promise.surface:
            result = run(bench.judge(promise))
            assert result.state is PromiseState.BROKEN
            assert "it was not tried: commands see files of the node" in result.reason
    run(bench.aclose())


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--list"], 0, "process_limit_ends_a_fork_bomb"),
        (["--group", "crowds", "--list"], 0, "6 of "),
        (["--group", "surface", "--list"], 0, "62 of "),
        ([LOCAL, "--group", "networks", "--only", "end_by_a_signal*"], 1, "Promised: "),
        ([LOCAL, "--only", "end_by_a_signal*"], 0, "1 kept, 0 broken, 0 not tried"),
        (["no-such-kind"], 1, "installed: "),
        (["no.such:Kind"], 1, "No module named"),
        ([LOCAL, "--group", "none"], 1, "there are: commands, "),
        ([LOCAL, "--only", "none"], 1, "--list shows them"),
        ([], 2, "Usage: "),
        (["--only", "end_by_a_signal*"], 2, "name a kind of sandbox"),
    ],
)
def test_promise_command_lists_and_selects_promises(words: list[str], code: int, expected: str) -> None:
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, expected in result.output) == (code, True), result.output


def test_extra_options_need_a_sandbox_or_an_engine() -> None:
    result = CliRunner().invoke(farm, ["doctor", "--list"])
    assert (result.exit_code, "only --sandbox NAME and --engine URL accept further options" in result.output) == (
        2,
        True,
    )


def test_doctor_checks_promises() -> None:
    """Run in a separate process, which becomes the doctor."""
    words = ["-c", "from farm.cli.main import main; main()", "doctor", "--sandbox", LOCAL, "--only", "end_by_a_signal*"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600)
    assert (done.returncode, "1 kept, 0 broken, 0 not tried" in done.stdout) == (0, True), done.stderr


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_promise_command_leaves_nothing(number: int, run: Run) -> None:
    # the preparation for a first sandbox is done from here on
    run(_start_and_stop())
    words = ["-m", "workers.conformance", "namespace", "--group", "limits"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as running:
        try:
            until(lambda: files_with("promise-"), "it has started a sandbox")
            started = {path.name for path in (*files_with("promise-"), *files_with("promises-"))}
            running.send_signal(number)
            output, _ = running.communicate(timeout=600)
        finally:
            running.kill()
    assert running.returncode == 130
    assert "left out, as it was interrupted" in output
    assert not left_of(*started)


async def _start_and_stop() -> None:
    sandbox = await NamespaceProvider().start("first", SandboxSpec())
    await (await sandbox.open_kernel()).close()
    await sandbox.stop()


def test_every_promise_has_a_unique_name_and_a_statement() -> None:
    assert len({promise.name for promise in PROMISES}) == len(PROMISES) > 100
    for promise in PROMISES:
        assert promise.statement.endswith("."), promise.name
        assert asyncio.iscoroutinefunction(promise.check), promise.name
