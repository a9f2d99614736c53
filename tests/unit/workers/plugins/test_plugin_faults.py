"""External cancellations pass a plug-in call; every other exception becomes one RolloutError."""

from __future__ import annotations

import asyncio
import errno

import pytest

from farm.errors import (
    AgentError,
    EngineError,
    HandlerError,
    ImageError,
    RolloutError,
    SandboxError,
    StaleRollout,
)
from tests.services.model_calls import model_call
from workers.plugins import plugin_faults, plugin_values
from workers.plugins.plugin_faults import described, fault_of, is_exhausted
from workers.stages.stage_job import StageJob, boundary

JOB = StageJob("b.0.0", 1, 0, "chat", {})


def test_external_cancellation_is_raised_and_an_internal_one_is_an_error() -> None:
    async def guarded(error: BaseException | None) -> None:
        async with boundary(JOB, "the call", HandlerError):
            if error is not None:
                raise error
            await asyncio.Event().wait()

    async def main() -> None:
        outside = asyncio.ensure_future(guarded(None))
        await asyncio.sleep(0)
        outside.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outside
        with pytest.raises(HandlerError, match=r"b\.0\.0: the call broke: it was cancelled from within"):
            await guarded(asyncio.CancelledError())
        # a child cancelled by other code is not this task's cancellation
        child = asyncio.ensure_future(asyncio.sleep(60))
        child.cancel()
        with pytest.raises(HandlerError, match="cancelled from within"):
            async with boundary(JOB, "the call", HandlerError):
                await child
        with pytest.raises(HandlerError, match=r"took longer than 0\.01 s"):
            async with boundary(JOB, "the call", HandlerError, 0.01):
                await asyncio.sleep(60)

    asyncio.run(main())


def test_exception_group_has_the_common_type_of_its_leaves() -> None:
    def kind(*errors: Exception) -> RolloutError:
        return fault_of(ExceptionGroup("several", list(errors)), "b.0.0", "agent a", AgentError)

    assert isinstance(kind(EngineError("gone"), EngineError("gone too")), EngineError)
    assert isinstance(kind(ExceptionGroup("inner", [SandboxError("full")])), SandboxError)
    mixed = kind(EngineError("gone"), ValueError("a bug"))
    assert type(mixed) is AgentError
    assert "ValueError: a bug" in str(mixed)


@pytest.mark.parametrize(
    "error",
    [
        HandlerError("it is always the same", retryable=False),
        ImageError("it is always the same", ["the last", "lines"], retryable=False),
        StaleRollout("it is always the same", restart=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_raised_for_several_rollouts_names_each_rollout(error: RolloutError) -> None:
    message, before = str(error), dict(vars(error))
    for rollout_id in ("b.0.0", "b.1.0", "b.0.0"):
        fault = fault_of(error, rollout_id, "agent a", AgentError)
        assert (str(fault), type(fault), vars(fault)) == (f"{rollout_id}: {message}", type(error), before)
    assert str(error) == message


def test_descriptions_are_bounded_and_show_no_sql() -> None:
    class Refused(Exception):
        def __init__(self) -> None:
            super().__init__("[SQL: INSERT INTO rollouts VALUES (1)]")
            self.orig = ValueError("integer out of range")

    assert described(Refused()) == "ValueError: integer out of range"
    assert len(described(ValueError("x" * 10_000_000))) <= 2_000
    assert described(ValueError("two\nlines\t of  it")) == "ValueError: two lines of it"
    group: Exception = ValueError("deep")
    for _ in range(5_000):
        group = ExceptionGroup("", [group])
    assert described(group) == "ExceptionGroup of 1: ValueError: deep"


def test_exhausted_threads_and_descriptors_are_recognized() -> None:
    assert is_exhausted(RuntimeError("can't start new thread"))
    wrapped = SandboxError("it did not start")
    wrapped.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert is_exhausted(wrapped)
    for error in (RuntimeError("another"), OSError(errno.ENOSPC, "full"), None):
        assert not is_exhausted(error)


def test_memory_shortage_is_distinguished_from_a_plug_ins_allocation() -> None:
    assert is_exhausted(MemoryError())
    wrapped = RuntimeError("the statement was not sent")
    wrapped.__cause__ = MemoryError()
    assert is_exhausted(wrapped)
    with pytest.raises(AgentError) as caught, plugin_faults.plugin_call("b.0.0", "agent a", AgentError):
        _ = [0] * (1 << 60)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not is_exhausted(caught.value)
    # an error caused by a plug-in's failure is its failure, too
    later = ValueError("while it was recorded")
    later.__context__ = caught.value
    assert not is_exhausted(later)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("finish_reason", ["stop"], EngineError),
        ("n_cached_tokens", 2**70, EngineError),
        ("n_cached_tokens", -1, EngineError),
        ("n_response_tokens", True, EngineError),
        ("n_prompt_tokens", 1.5, EngineError),
        ("policy_version", 7, EngineError),
        ("stop_reason", {1, 2}, EngineError),
        ("response", {"content": b"x"}, EngineError),
        ("observations", [{"content": object()}], AgentError),
        ("messages", [{("a",): 1}], AgentError),
        ("sampling", {"seed": 2**70}, AgentError),
        ("tools", {"name": "look"}, AgentError),
        ("tools", ["look"], AgentError),
        ("tools", [{"name": b"look"}], AgentError),
    ],
)
def test_recorded_call_fields_are_checked_by_name(field: str, value: object, kind: type[RolloutError]) -> None:
    call = model_call(response={"role": "assistant", "content": "\0\ud800"})
    plugin_values.record(call, "b.0.0")
    setattr(call, field, value)
    with pytest.raises(kind, match=rf"b\.0\.0: .*({field}|its message)"):
        plugin_values.record(call, "b.0.0")
