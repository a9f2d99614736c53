"""Plug-ins of a job, resolved once; optional features of providers are detected only by their methods."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from farm.errors import AgentError, HandlerError
from farm.plugins import find_installed
from farm.records.request import BatchSettings, SandboxSpec
from farm.records.trajectory import Message
from workers.plugins import registry
from workers.plugins.handler import Handler
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator, Sandbox
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.optional_protocols import Prepare, shares_layers, starts_ahead
from workers.stages import stage_functions
from workers.stages.stage_job import StageJob, resolve, resolve_problem
from workers.testing.fakes import FakeProvider
from workers.testing.local_sandbox import LocalProvider


class SharingProvider:
    """Derives from no class of the farm, and prepares once."""

    kind: ClassVar[str] = "sharing"

    def __init__(self) -> None:
        self._own = FakeProvider()
        self.prepared: set[str] = set()
        self.n_prepared = 0

    def missing(self) -> str:
        return ""

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        return await self._own.start(sandbox_id, spec)

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        return await self._own.attach(sandbox_id, spec)

    async def start_prepared(self, sandbox_id: str, spec: SandboxSpec, what: str, prepare: Prepare) -> Sandbox:
        sandbox = await self._own.start(sandbox_id, spec)
        if what not in self.prepared:
            self.prepared.add(what)
            self.n_prepared += 1
            await prepare(sandbox)
        return sandbox


class OnceInstance(BaseModel):
    """One value."""

    n: int


class OnceHandler(Handler[OnceInstance]):
    """Counts the requests for its sandbox, and prepares once."""

    data_source: ClassVar[str] = "once"
    instance_type: ClassVar[type[BaseModel]] = OnceInstance
    prepares_once: ClassVar[bool] = True
    n_sandbox: ClassVar[int] = 0

    def sandbox(self) -> SandboxSpec | None:
        OnceHandler.n_sandbox += 1
        return SandboxSpec() if self.instance.n else None

    def messages(self) -> list[Message]:
        return []

    async def prepare(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("n", b"1")

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "once-1.dist-info").mkdir()
    (tmp_path / "once-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: once\nVersion: 1\n")
    (tmp_path / "once-1.dist-info/entry_points.txt").write_text(
        f"[farm.handlers]\nonce = {__name__}:OnceHandler\n[farm.sandboxes]\nsharing = {__name__}:SharingProvider\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    find_installed()
    yield
    find_installed()
    registry.sandbox.cache_clear()


def job(n: int = 1, n_samples: int = 1, **more: Any) -> StageJob:
    values: dict[str, Any] = {
        "data_source": "once",
        "fields": {"n": n},
        "sandbox_kind": "sharing",
        "batch": BatchSettings(n_samples=n_samples),
    }
    values |= {"rollout_id": "b.0.0", "attempt": 1, "sample_index": 0}
    return StageJob(**(values | more))


def test_all_plug_ins_of_a_stage_are_resolved_together() -> None:
    resolved = resolve(resolve_problem(job()))
    assert isinstance(resolved.problem.handler.instance, OnceInstance)
    assert resolved.agent_name == "react"
    assert resolved.source is not None
    assert resolved.source.provider is registry.sandbox("sharing")


def test_job_without_a_sandbox_has_no_source() -> None:
    assert resolve(resolve_problem(job(0))).source is None


def test_handler_declared_without_a_sandbox_may_not_request_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnceHandler, "without_sandbox", True, raising=False)
    assert not asyncio.run(stage_functions.init(resolve_problem(job(0))))
    with pytest.raises(HandlerError, match=r"^b\.0\.0: .*without_sandbox") as refused:
        asyncio.run(stage_functions.init(resolve_problem(job())))
    assert not refused.value.retryable


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"batch": BatchSettings(agent="none")}, AgentError),
        ({"fields": {}}, HandlerError),
        ({"data_source": "x"}, HandlerError),
    ],
)
def test_missing_plug_in_is_named_with_the_rollout(more: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^b\.0\.0: "):
        resolve(resolve_problem(job(**more)))


@pytest.mark.parametrize(("n_samples", "shared"), [(1, False), (2, True)])
def test_only_rollouts_with_siblings_share_layers(n_samples: int, shared: bool) -> None:
    assert bool(resolve_problem(job(n_samples=n_samples)).shared()) is shared


def test_provider_that_shares_layers_prepares_once_for_all_samples() -> None:
    for sample in range(3):
        asyncio.run(stage_functions.init(resolve_problem(job(n_samples=3, rollout_id=f"b.0.{sample}"))))
    provider = registry.sandbox("sharing")
    assert isinstance(provider, SharingProvider)
    assert provider.n_prepared == 1


def test_handler_is_asked_for_its_sandbox_once_per_stage() -> None:
    before = OnceHandler.n_sandbox
    asyncio.run(stage_functions.init(resolve_problem(job())))
    assert OnceHandler.n_sandbox == before + 1


def test_protocols_are_detected_by_their_methods() -> None:
    ours, sharing = NamespaceProvider(), SharingProvider()
    assert (shares_layers(ours), starts_ahead(ours)) == (ours, ours)
    assert (shares_layers(sharing), starts_ahead(sharing)) == (sharing, None)
    for plain in (LocalProvider(), FakeProvider()):
        assert (shares_layers(plain), starts_ahead(plain)) == (None, None)
