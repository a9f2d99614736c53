"""Plug-ins at their worst: each costs only its own rollout an attempt, and its error names it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.records.rollout import Outcome, Rollout, State
from tests.services.farms import embedded, farm_folder, left_of
from tests.services.unruly import DETAILS, RAISES, installed_in

PLACES = {
    "sandbox": (Outcome.HANDLER_ERROR, "the handler's sandbox()"),
    "messages": (Outcome.HANDLER_ERROR, "the handler's messages()"),
    "agent": (Outcome.AGENT_ERROR, "agent unruly"),
    "collect": (Outcome.HANDLER_ERROR, "collecting the submission"),
    "evaluator": (Outcome.HANDLER_ERROR, "the handler's evaluator()"),
    "evaluate": (Outcome.EVALUATOR_ERROR, "scoring"),
}
NAMED = {
    "exit": "SystemExit",
    "exit with text": "SystemExit: enough",
    "interrupt": "KeyboardInterrupt",
    "generator exit": "GeneratorExit",
    "base": "OwnBaseException: of its own",
    "cancelled": "cancelled from within",
    "unspeakable": "Unspeakable",
    "group": "ValueError: one; KeyError: 'two'",
    "base group": "SystemExit: 3; KeyboardInterrupt",
    "recursion": "RecursionError",
    "memory": "MemoryError",
    "close loop": "RuntimeError",
    "signal handler": "signal only works in main thread",
    "import": "ModuleNotFoundError",
    "syntax": "SyntaxError",
    "farm's own": "it says so",
    "own kind": "OwnKind: of its own kind",
    "unspeakable kind": "UnspeakableKind",
}


@dataclass(frozen=True)
class _Row:
    fault: str
    outcome: Outcome
    says: str


ROWS = [
    *(
        _Row(f"{place}:{kind}", outcome, f"{what}.*{NAMED.get(kind, '')}")
        for place, (outcome, what) in PLACES.items()
        for kind in RAISES
        if not (kind == "timeout" and place == "agent")
    ),
    _Row("agent:cancel itself", Outcome.AGENT_ERROR, "cancelled from within"),
    _Row("agent:thread exits", Outcome.AGENT_ERROR, "SystemExit"),
    _Row("agent:tasks break", Outcome.ENGINE_ERROR, "an engine broke in a branch"),
    _Row("agent:answer bytes", Outcome.AGENT_ERROR, "answered with a bytes"),
    _Row("agent:none", Outcome.AGENT_ERROR, "returned None, not an AgentResult"),
    _Row("collect:none", Outcome.HANDLER_ERROR, "returned None, not a Submission"),
    _Row("collect:dict", Outcome.HANDLER_ERROR, "returned a dict, not a Submission"),
    _Row("collect:bytes", Outcome.HANDLER_ERROR, "answer is a bytes"),
    _Row("collect:files", Outcome.HANDLER_ERROR, "files has a bytes for 'a'"),
    _Row("collect:keys", Outcome.HANDLER_ERROR, "files has"),
    _Row("collect:huge", Outcome.HANDLER_ERROR, "more than the 64000000 bytes allowed"),
    _Row("evaluate:no score", Outcome.EVALUATOR_ERROR, "evaluator unruly returned a float, not a Score"),
    *(_Row(f"details:{kind}", Outcome.EVALUATOR_ERROR, "evaluator unruly.*details") for kind in DETAILS),
]
HARMLESS = [
    # leftovers of these no longer belong to the stage
    "agent:task exits",
    "agent:callback exits",
    "agent:stop loop",
    # arbitrary texts of the policy
    "collect:texts",
    "details:fit",
]
N_GOOD = 12


def unruly(fault: str, **more: Any) -> dict[str, Any]:
    return {"data_source": "unruly", "fields": {"fault": fault} | more}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture(scope="module")
def results(folder: Path) -> Iterator[dict[str, Rollout]]:
    """Run all of them at once, with some correct ones, in one worker of each stage."""
    faults = [*(row.fault for row in ROWS), *HARMLESS, *(f"good {n}" for n in range(N_GOOD))]
    request = {"instances": [unruly(fault, seconds=0.5) for fault in faults], "max_attempts": 1, "max_losses": 0}
    env: dict[str, Any] = installed_in(folder) | {
        "FARM_WARM_POOL": "0",
        "FARM_LEASE_S": "60",
        "FARM_NODE_TIMEOUT_S": "60",
    }
    with embedded(folder, **env) as here, farm.connect(here.store_url, broker_url=here.broker_url) as client:
        result = client.collect(client.submit(request), timeout_s=600)
        # the same workers continue
        again = client.collect(client.submit({"instances": [unruly("")] * 8}), timeout_s=600)
        assert all(rollout.reward == 1.0 for rollout in again)
        yield dict(zip(faults, result, strict=True))
    assert left_of(folder) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault)
def test_fault_of_a_plugin_fails_its_rollout_and_is_named(results: dict[str, Rollout], row: _Row) -> None:
    rollout = results[row.fault]
    assert rollout.failure is not None
    assert rollout.outcome == row.outcome, rollout.failure
    start = row.says.partition(".*")
    for part in (start[0], start[2]):
        assert part in rollout.failure.message, rollout.failure.message
    assert rollout.rollout_id in rollout.failure.message
    assert (rollout.n_failures, rollout.n_lost, rollout.reward) == (1, 0, None)
    assert "SQL" not in rollout.failure.message
    assert "internal error of the farm" not in rollout.failure.message
    assert len(rollout.failure.message) < 5_000


@pytest.mark.parametrize("fault", [*HARMLESS, *(f"good {n}" for n in range(N_GOOD))])
def test_other_rollouts_complete(results: dict[str, Rollout], fault: str) -> None:
    rollout = results[fault]
    assert rollout.state is State.COMPLETED, rollout.failure
    assert (rollout.reward, rollout.n_failures, rollout.n_lost, rollout.attempt) == (1.0, 0, 0, 1)


def test_no_worker_exited(results: dict[str, Rollout], folder: Path) -> None:
    log = (folder / "home/logs/node.log").read_text()
    assert "exited (" not in log, log
