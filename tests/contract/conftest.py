"""Sandboxes for the contract tests: a shared one of each kind for tests that do not damage it, new ones for others."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import pytest

from farm.records.request import SandboxSpec
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import (
    ABOVE_THE_KIND,
    ABOVE_THE_KIND_PROMISES,
    ABOVE_THE_KIND_TESTS,
    FAKES,
    PROVIDERS,
    farm_in,
)
from tests.services.farms import farm_folder as new_farm_folder
from tests.services.soak import ONLY
from workers.conformance.bench import PromiseBench
from workers.plugins.interfaces import Sandbox, SandboxProvider
from workers.sandboxes.remove_tree import remove

Run: TypeAlias = Callable[[Awaitable[Any]], Any]
Start: TypeAlias = Callable[..., Sandbox]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make soak` tests of each kind of sandbox whose subject does not depend on the kind."""
    for item in items:
        if _runs_in_soak_only(item):
            item.add_marker(ONLY)


def _runs_in_soak_only(item: pytest.Item) -> bool:
    params: dict[str, Any] = {}
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        params = item.callspec.params
    kind, _ = params.get("image_bench") or (params.get("provider"), "")
    if kind not in list(PROVIDERS)[1:]:
        return False
    promise = getattr(params.get("promise"), "name", "")
    name = item.originalname if isinstance(item, pytest.Function) else ""
    return str(item.path).endswith(ABOVE_THE_KIND) or name in ABOVE_THE_KIND_TESTS or promise in ABOVE_THE_KIND_PROMISES


@pytest.fixture(scope="session")
def _farm_folder() -> Iterator[Path]:
    """Yield the folder of one farm, which all contract tests of a process share. Their own files are in `open_folder`.

    It is open to all, unlike pytest's folders: started by root, sandboxes run as an ordinary user.
    """
    with new_farm_folder() as folder:
        yield folder
        # this must come before it is deleted like an ordinary folder, which it is not
        remove(folder)


@pytest.fixture(scope="module")
def open_folder(_farm_folder: Path) -> Path:
    """Return a new folder for the files of one module, which sandboxes of another user can pass through."""
    folder = Path(tempfile.mkdtemp(dir=_farm_folder))
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def sandbox_settings(_farm_folder: Path) -> Iterator[None]:
    with farm_in(_farm_folder):
        yield


@pytest.fixture(scope="module")
def run(sandbox_settings: None) -> Iterator[Run]:
    """Yield a function that runs a coroutine to its end, on one loop per module, as in a worker process."""
    with asyncio.Runner() as runner:
        yield lambda coroutine: runner.run(_as_coroutine(coroutine))


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


@pytest.fixture(scope="module", params=PROVIDERS)
def provider(request: pytest.FixtureRequest, sandbox_settings: None) -> SandboxProvider:
    """Yield each kind in turn.

    Tests of one kind share their fixtures if each of their parameters has a separate `parametrize`: where two are given
    together pytest treats each pair as a new kind.
    """
    return provider_of(request.param, request)


def provider_of(kind: str, request: pytest.FixtureRequest) -> SandboxProvider:
    if kind == "singularity":
        request.getfixturevalue("apptainer")
    sandbox_provider = {**PROVIDERS, **FAKES}[kind]()
    if missing := sandbox_provider.missing():
        absent(missing)
    return sandbox_provider


@pytest.fixture(scope="module")
def bench(provider: SandboxProvider, run: Run) -> Iterator[PromiseBench]:
    """Yield a bench for promises, with a sandbox that they share."""
    opened = PromiseBench(provider)
    yield opened
    run(opened.aclose())


@pytest.fixture
def start(provider: SandboxProvider, run: Run) -> Iterator[Start]:
    """Yield a function that starts sandboxes, which end with the test, from the fields of a SandboxSpec."""
    started: list[Sandbox] = []

    def start_one(**fields: Any) -> Sandbox:
        started.append(run(provider.start(f"test-{uuid4().hex[:12]}", SandboxSpec(**fields))))
        return started[-1]

    yield start_one
    for sandbox in started:
        run(sandbox.stop())


@pytest.fixture(scope="module")
def sandbox(provider: SandboxProvider, run: Run) -> Iterator[Sandbox]:
    """Yield a sandbox that the tests of a module share."""
    shared = run(provider.start(f"shared-{uuid4().hex[:12]}", SandboxSpec(env={"GREETING": "hello"})))
    yield shared
    run(shared.stop())
