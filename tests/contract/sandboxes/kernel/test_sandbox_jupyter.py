"""Jupyter kernels of a sandbox: how they are found and started, and the errors for missing ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from uuid import uuid4

import pytest

from farm.errors import SandboxError
from farm.records.request import SandboxSpec
from tests.conftest import absent
from tests.contract.sandboxes.kernel.kernels import BACK_ENDS, OF_A_START
from tests.services.environments import lend_environment
from workers.plugins.interfaces import Sandbox, SandboxProvider

Run: TypeAlias = Callable[[Any], Any]
Describe: TypeAlias = Callable[..., str]

LAUNCH = ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"]


@pytest.fixture(scope="module")
def place(provider: SandboxProvider, run: Run) -> Iterator[Sandbox]:
    try:
        lend_environment(BACK_ENDS["jupyter"][1], imported=OF_A_START)
        spec = SandboxSpec(packages=BACK_ENDS["jupyter"][1])
        sandbox = run(provider.start(f"jupyter-{uuid4().hex[:12]}", spec))
    except SandboxError as error:
        absent(f"no sandbox with ipykernel, which comes from the package index: {error}")
    yield sandbox
    run(sandbox.stop())


@pytest.fixture
def describe(place: Sandbox, run: Run) -> Describe:
    """Return a function that writes a kernel spec to the user's folder, and returns its name."""

    def write(text: str = "", **fields: Any) -> str:
        name = f"own-{uuid4().hex[:6]}"
        described = text or json.dumps({"display_name": name, "language": "python", **fields})
        run(place.write_file(f"/root/.local/share/jupyter/kernels/{name}/kernel.json", described.encode()))
        return name

    return write


def test_kernel_from_a_kernel_spec_is_started(place: Sandbox, run: Run, describe: Describe) -> None:
    kernel = run(place.open_kernel(describe(argv=LAUNCH, env={"OWN": "value"})))
    assert run(kernel.run("import os; print(os.environ['OWN'], os.getcwd())", 20)).output == "value /workspace\n"
    assert run(kernel.run("open('/proc/self/exe', 'rb').close(); import sys; print(sys.prefix)", 20)).error == ""
    run(kernel.close())


def test_kernel_is_interrupted_by_a_message(place: Sandbox, run: Run, describe: Describe) -> None:
    kernel = run(place.open_kernel(describe(argv=LAUNCH, interrupt_mode="message")))
    result = run(kernel.run("x = 5\nimport time; time.sleep(100)", 2))
    assert (result.timed_out, result.restarted, result.error) == (True, False, "KeyboardInterrupt")
    assert run(kernel.run("print(x)", 20)).output == "5\n"
    run(kernel.close())


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"argv": ["bash", "-c", "echo no luck today >&2; exit 1"]}, "no luck today"),
        ({"argv": ["no-such-program", "{connection_file}"]}, "no-such-program"),
        ({"argv": []}, "no interpreter"),
        ({"text": "rubbish"}, "no interpreter"),
    ],
)
def test_kernel_that_does_not_start_names_its_cause(
    fields: dict[str, Any], complaint: str, place: Sandbox, run: Run, describe: Describe
) -> None:
    with pytest.raises(SandboxError, match=complaint):
        run(place.open_kernel(describe(**fields)))


@pytest.mark.parametrize("name", ["none", "../python3", "/etc", "a b", "\n"])
def test_missing_kernel_is_refused(name: str, place: Sandbox, run: Run) -> None:
    with pytest.raises(SandboxError, match=place.sandbox_id):
        run(place.open_kernel(name))


def test_kernel_sockets_are_private_to_their_sandbox(place: Sandbox, run: Run) -> None:
    kernel = run(place.open_kernel("python3"))
    # the connection file of a kernel that was just killed may still exist
    folders = [path for path in place.socket_folder.iterdir() if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    folder = max(folders, key=lambda path: path.stat().st_mtime_ns)
    assert {path.name for path in folder.iterdir() if path.is_socket()} >= {"socket-1", "socket-2", "socket-3"}
    run(kernel.close())


def test_kernel_starts_with_python_variables(provider: SandboxProvider, place: Sandbox, run: Run) -> None:
    """The client that controls it is then started inside, and not forked."""
    spec = SandboxSpec(packages=BACK_ENDS["jupyter"][1], env={"PYTHONHASHSEED": "0"})
    sandbox = run(provider.start(f"seeded-{uuid4().hex[:12]}", spec))
    kernel = run(sandbox.open_kernel("python3"))
    expected = run(sandbox.exec(["python3", "-c", "print(hash('text'))"], timeout_s=20)).stdout.decode()
    assert run(kernel.run("print(hash('text'))", 20)).output == expected
    run(kernel.close())
    run(sandbox.stop())
