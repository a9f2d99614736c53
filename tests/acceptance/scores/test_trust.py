"""Attribution of each end and its consequences: a row for every failure that can be induced, on a real farm.

Each row is one rollout. An end caused by the policy keeps its score; any other end has no number anywhere: no reward on
the rollout, none in the store, and no row that trains.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

import farm
from farm.adapters.arrays import arrays
from farm.records.rollout import POLICY_OUTCOMES, Outcome, Rollout, Stage, State
from farm.retry_policy import Budget
from farm.settings import Settings
from tests.conftest import absent
from tests.doubles import FAULTS, EngineDouble
from tests.services.farms import QUICK, PreloadedFarm, farm_folder, until
from tests.services.unruly import installed_in
from workers.plugins.registry import sandbox as provider
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

NEVER, FAILURES, LOSSES, RESTARTS, _ = Budget
QUESTION = "How many hops?"
SUBMIT = ScriptedTurn(tool_calls=(ScriptedCall(name="submit", arguments={"answer": "done"}),))
LONG = "one hop and then another hop " * 100


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command}),))


BRANCHES: dict[str, tuple[ScriptedTurn, ...]] = {
    QUESTION: (ScriptedTurn(content="three"),),
    "Tell me at length.": (ScriptedTurn(content=LONG),),
    "Submit.": (SUBMIT,),
    "Sleep.": (bash("sleep 1000"), SUBMIT),
    "Take all memory.": (bash("python3 -c 'x = bytearray(10**9)'"), SUBMIT),
    "Fill the disk.": (bash("head -c 100M /dev/zero > big"), SUBMIT),
    "Kill the shell.": (bash("kill -9 $$"), SUBMIT),
    "Play on.": tuple(bash(f"echo {n}") for n in range(9)),
    "Repeat.": (bash("true"),) * 9,
    "Stumble.": tuple(ScriptedTurn(tool_calls=(ScriptedCall(name="juggle", arguments={"n": n}),)) for n in range(9)),
}
SCRIPT = Script(
    [
        ScriptedProblem(match=question, branches=(Branch(name="only", turns=turns),))
        for question, turns in BRANCHES.items()
    ]
)


def unruly(fault: str, where: str = "", **more: Any) -> dict[str, Any]:
    return {"data_source": "unruly", "fields": {"fault": fault, "where": where} | more}


def working(question: str) -> dict[str, Any]:
    return {"data_source": "working", "fields": {"question": question}}


def chat(question: str = QUESTION) -> dict[str, Any]:
    return {"data_source": "chat", "fields": {"question": question}}


@dataclass(frozen=True)
class _Row:
    """One rollout and its expected result. `engine` are the options of a separate engine; `says` is in its failure.

    Exactly the ends caused by the policy are scored; `trains` tells whether its rows train, too.
    """

    name: str
    instance: dict[str, Any]
    outcome: Outcome
    budget: Budget
    says: str = ""
    engine: Mapping[str, Any] | None = None
    fault: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    max_attempts: int = 2
    trains: bool = True

    @property
    def request(self) -> dict[str, Any]:
        model = {"model": self.name} if self.engine is not None else {}
        limits = {"run_s": 60, "init_s": 60, "tool_s": 20} | dict(self.limits)
        return {"instances": [self.instance], "limits": limits, "max_attempts": self.max_attempts} | model


def faulty_engine_row(fault: str, outcome: Outcome, budget: Budget, says: str = "", **more: Any) -> _Row:
    """Return a row with an engine that does this to every call."""
    return _Row(f"engine-{fault}", chat(), outcome, budget, says, engine={"slow_s": 0.5}, fault=fault, **more)


DEADLINE: dict[str, Any] = {"limits": {"run_s": 5}, "max_attempts": 1}

THE_POLICYS = [
    _Row("submitted", working("Submit."), Outcome.SUBMITTED, NEVER, engine={}),
    _Row("answered", chat(), Outcome.ANSWERED, NEVER, engine={}),
    _Row("max_turns", working("Play on."), Outcome.MAX_TURNS, NEVER, engine={}, limits={"max_turns": 2}),
    _Row("max_tokens", chat("Tell me at length."), Outcome.MAX_TOKENS, NEVER, engine={}, limits={"max_tokens": 9}),
    _Row("context_full", chat("Tell me at length."), Outcome.CONTEXT_FULL, NEVER, engine={"context_tokens": 200}),
    _Row("invalid_action", working("Stumble."), Outcome.INVALID_ACTION, NEVER, engine={}),
    _Row("repeating", working("Repeat."), Outcome.REPEATING, NEVER, engine={}, limits={"max_repeats": 3}),
    _Row("slow-policy", chat("Tell me at length."), Outcome.DEADLINE, NEVER, engine={"tokens_per_s": 5}, **DEADLINE),
    _Row("slow-agent", unruly("agent:stubborn"), Outcome.DEADLINE, NEVER, **DEADLINE),
    _Row("tool-timeout", working("Sleep."), Outcome.SUBMITTED, NEVER, engine={}, limits={"tool_s": 2}),
    _Row("memory", working("Take all memory."), Outcome.SUBMITTED, NEVER, engine={}),
    _Row("disk", working("Fill the disk."), Outcome.SUBMITTED, NEVER, engine={}),
    _Row("killed-shell", working("Kill the shell."), Outcome.SUBMITTED, NEVER, engine={}),
]
THE_ENGINES = [
    faulty_engine_row("500", Outcome.ENGINE_ERROR, FAILURES, "500"),
    faulty_engine_row("502", Outcome.ENGINE_ERROR, FAILURES, "502"),
    # they end while the engine is left alone, or at the moment of a retry
    faulty_engine_row(
        "429",
        Outcome.ENGINE_ERROR,
        FAILURES,
        "its 5 s ended while it waited for engines: .*(busy|answered 429)",
        **DEADLINE,
    ),
    faulty_engine_row(
        "503",
        Outcome.ENGINE_ERROR,
        FAILURES,
        "its 5 s ended while it waited for engines: .*(busy|answered 503)",
        **DEADLINE,
    ),
    faulty_engine_row("close", Outcome.ENGINE_ERROR, FAILURES, "tries failed"),
    faulty_engine_row("reset", Outcome.ENGINE_ERROR, FAILURES, "tries failed"),
    faulty_engine_row("hang", Outcome.ENGINE_ERROR, FAILURES, max_attempts=1),
    faulty_engine_row("lengths", Outcome.ENGINE_ERROR, FAILURES),
    faulty_engine_row("garbage", Outcome.ENGINE_ERROR, FAILURES, "tries failed"),
    faulty_engine_row("slow", Outcome.ANSWERED, NEVER),
    faulty_engine_row("echo", Outcome.ANSWERED, NEVER, trains=False),
    # the same deadline as that of `slow-policy`, but no score
    _Row(
        "engine-dead",
        chat(),
        Outcome.ENGINE_ERROR,
        FAILURES,
        "ended while it waited for engines: .* is out",
        engine={},
        **DEADLINE,
    ),
]
THE_SANDBOXS = [
    _Row("unstartable", unruly("", "unstartable"), Outcome.SANDBOX_ERROR, FAILURES, "relative"),
    _Row("imageless", unruly("", "imageless"), Outcome.SANDBOX_ERROR, NEVER, "/there/is/none"),
    _Row("killed", unruly("sandbox:killed", "host"), Outcome.SANDBOX_ERROR, FAILURES),
    _Row("killed-late", unruly("sandbox:killed late", "host"), Outcome.SANDBOX_ERROR, FAILURES),
    _Row("node-sick", unruly("node:sick"), Outcome.SANDBOX_ERROR, FAILURES, "no space is left"),
]
THE_PLUGINS = [
    _Row("invalid-instance", {"data_source": "unruly", "fields": {"fault": 7}}, Outcome.HANDLER_ERROR, NEVER, "fault"),
    _Row("sandbox-raises", unruly("sandbox:raise"), Outcome.HANDLER_ERROR, FAILURES, "RuntimeError"),
    _Row("messages-raises", unruly("messages:raise"), Outcome.HANDLER_ERROR, FAILURES, "RuntimeError"),
    _Row("prepare-raises", unruly("prepare:raise", "host"), Outcome.HANDLER_ERROR, FAILURES, "RuntimeError"),
    _Row("collect-raises", unruly("collect:raise"), Outcome.HANDLER_ERROR, FAILURES, "RuntimeError"),
    _Row("collect-hangs", unruly("collect:hang"), Outcome.HANDLER_ERROR, FAILURES, "1 s", limits={"tool_s": 1}),
    _Row("agent-raises", unruly("agent:raise"), Outcome.AGENT_ERROR, FAILURES, "RuntimeError"),
    _Row("agent-cancelled", unruly("agent:cancelled"), Outcome.AGENT_ERROR, FAILURES, "cancelled from within"),
    _Row("agent-says-lost", unruly("agent:outcome"), Outcome.AGENT_ERROR, FAILURES, "lost"),
    _Row("agent-says-nothing", unruly("agent:none"), Outcome.AGENT_ERROR, FAILURES),
    _Row("evaluator-raises", unruly("evaluate:raise"), Outcome.EVALUATOR_ERROR, FAILURES, "RuntimeError"),
    _Row(
        "evaluator-hangs",
        unruly("evaluate:hang"),
        Outcome.EVALUATOR_ERROR,
        FAILURES,
        "longer than",
        limits={"eval_s": 0.5, "init_s": 5},
        max_attempts=1,
    ),
    *(
        _Row(f"score-{what}", unruly(f"evaluate:{what}"), Outcome.EVALUATOR_ERROR, FAILURES)
        for what in ("nan", "infinite", "text", "none", "complex")
    ),
    _Row("score-unwritable", unruly("details:object"), Outcome.EVALUATOR_ERROR, FAILURES, "details: what is a object"),
]
ROWS = [*THE_POLICYS, *THE_ENGINES, *THE_SANDBOXS, *THE_PLUGINS]
APART = {Outcome.LOST, Outcome.CANCELLED, Outcome.STALE}
"""Outcomes that affect all running rollouts, or that are ordered of all engines: run separately, below."""


@pytest.fixture(scope="module")
def client() -> Iterator[farm.Farm]:
    if missing := provider("namespace").missing():
        absent(missing)
    with farm_folder() as folder:
        settings = Settings(home=folder / "home", scratch=folder / "scratch", store_url="", broker_url="")
        env = QUICK | {"FARM_SANDBOX": "namespace", "FARM_POLICY_TIMEOUT_S": "10", "FARM_WARM_POOL": "0"}
        # on a busy machine only killed rollouts may be lost
        env |= {"FARM_LEASE_S": "60", "FARM_NODE_TIMEOUT_S": "60"}
        options = ("--init", "8", "--run", "60", "--eval", "16")
        here = PreloadedFarm(settings, node_options=options, flower=False, env=env | installed_in(folder))
        with here, farm.connect(here.store_url, broker_url=here.broker_url) as connected:
            yield connected


@pytest.fixture(scope="module")
def ended_rollouts(client: farm.Farm) -> Iterator[dict[str, Rollout]]:
    """Run every row, all of them at once."""
    doubles: dict[str, EngineDouble] = {}
    with ExitStack() as serves:
        for row in ROWS:
            if row.engine is not None and row.name != "engine-dead":
                doubles[row.name] = EngineDouble(SCRIPT, model=row.name, **row.engine)
                client.add_engine(f"{serves.enter_context(serving(doubles[row.name].app()))}/v1", model=row.name)
        until(lambda: all(each.engine.info is not None for each in client.engines()), "all engines are known", 120.0)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            nobody = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        client.add_engine(nobody, model="engine-dead")
        for row in ROWS:
            if row.fault:
                # only once it is detected, as detection samples
                doubles[row.name].faults.set_rates({row.fault: 1.0})
        batches = {row.name: client.submit(row.request) for row in ROWS}
        yield {name: client.collect(batch_id, timeout_s=600)[0] for name, batch_id in batches.items()}
        client.clear_engines(forget_weights=True)


def check(client: farm.Farm, rollout: Rollout, outcome: Outcome, trains: bool = True) -> None:
    """Check that a rollout ended so, and has a score exactly if the policy caused it."""
    scored = outcome in POLICY_OUTCOMES
    assert rollout.outcome == outcome, rollout.failure
    assert (rollout.failure is None) == (scored or outcome is Outcome.CANCELLED)
    assert rollout.state is (State.COMPLETED if scored else State.CANCELLED if outcome == "cancelled" else State.FAILED)
    assert (rollout.reward is not None, rollout.trainable) == (scored, scored)
    assert len(client.rewards(rollout.rollout_id)) == scored
    if rollout.segments or not scored:
        assert bool(len(arrays([rollout]))) == (scored and trains)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_cause_gives_its_outcome_score_and_budget(
    client: farm.Farm, ended_rollouts: dict[str, Rollout], row: _Row
) -> None:
    rollout = ended_rollouts[row.name]
    check(client, rollout, row.outcome, row.trains)
    if rollout.failure is not None:
        assert re.search(row.says, rollout.failure.message), rollout.failure.message
    timings = client.timings(rollout.rollout_id)
    # of a neighbour's kills for lack of memory
    n_short = sum("the node ran short" in str(timing.failure) for timing in timings)
    n = row.max_attempts if row.budget is FAILURES else n_short
    failures = [str(timing.failure) for timing in timings if timing.failure is not None]
    assert (rollout.n_failures, rollout.n_lost, rollout.n_restarts) == (n, 0, 0), failures
    # only counted failures are retried, and after the run only the scoring
    assert rollout.attempt == max(1, n if row.budget is FAILURES else 1 + n_short)
    runs = [timing for timing in timings if timing.stage is Stage.RUN]
    assert len(runs) <= (1 if rollout.stage is Stage.EVAL else rollout.attempt)


def test_every_outcome_and_fault_is_covered() -> None:
    assert {row.outcome for row in ROWS} | APART == set(Outcome)
    assert {row.name for row in THE_ENGINES} >= {f"engine-{fault}" for fault in FAULTS}
    assert not {row.outcome for row in ROWS} & APART


def test_lost_rollout_has_no_score(client: farm.Farm, ended_rollouts: dict[str, Rollout]) -> None:
    request = {"instances": [unruly("agent:die")], "max_losses": 0}
    (rollout,) = client.collect(client.submit(request), timeout_s=600)
    check(client, rollout, Outcome.LOST)
    assert (rollout.n_failures, rollout.n_lost, rollout.attempt) == (0, 1, 1)


def test_lost_rollout_is_retried_without_counting_a_failure(
    client: farm.Farm, ended_rollouts: dict[str, Rollout], tmp_path: Any
) -> None:
    request = {"instances": [unruly("agent:die", times=1, marks=str(tmp_path))], "max_attempts": 1}
    (rollout,) = client.collect(client.submit(request), timeout_s=600)
    check(client, rollout, Outcome.SUBMITTED)
    assert (rollout.n_failures, rollout.n_lost, rollout.attempt) == (0, 1, 2)


def test_cancelled_rollout_has_no_score(client: farm.Farm, ended_rollouts: dict[str, Rollout]) -> None:
    batch_id = client.submit({"instances": [unruly("", seconds=1000.0)]})
    until(lambda: client.status(batch_id).stages[Stage.RUN][State.ACTIVE] == 1, "it runs", 120.0)
    client.cancel(batch_id)
    (rollout,) = client.collect(batch_id, timeout_s=600)
    check(client, rollout, Outcome.CANCELLED)
    assert (rollout.n_failures, rollout.n_lost) == (0, 0)


@pytest.mark.parametrize(("on_stale", "n_restarts", "attempt"), [("drop", 0, 1), ("restart", 2, 2)])
def test_stale_rollout_has_no_score(
    client: farm.Farm, ended_rollouts: dict[str, Rollout], on_stale: str, n_restarts: int, attempt: int
) -> None:
    """Restarted, it is overtaken again and again, up to the limit."""
    client.clear_engines(forget_weights=True)
    double = EngineDouble(SCRIPT, weight_version="1", tokens_per_s=50)
    with serving(double.app()) as url:
        client.add_engine(f"{url}/v1")
        until(lambda: client.engines()[0].engine.info is not None, "the engine is known", 120.0)
        rules = {"max_staleness": 0, "on_stale": on_stale, "max_attempts": 1, "limits": {"max_tokens": 100}}
        batch_id = client.submit({"instances": [chat("Tell me at length.")]} | rules)
        make_stale(client, double, batch_id)
        (rollout,) = client.collect(batch_id, timeout_s=600)
        client.clear_engines(forget_weights=True)
    check(client, rollout, Outcome.STALE)
    assert (rollout.n_failures, rollout.n_restarts, rollout.attempt) == (0, n_restarts, attempt)


def make_stale(client: farm.Farm, double: EngineDouble, batch_id: str) -> None:
    """Name new weights whenever some tokens have been sampled, until the batch has ended."""
    for version in range(2, 100):
        n_before = double.n_tokens
        until(partial(sampled_or_done, client, double, batch_id, n_before + 10), "it runs", 120.0)
        if client.status(batch_id).done:
            return
        with client.weight_update(str(version), mode="keep"):
            pass
    raise AssertionError("it was overtaken a hundred times and goes on")


def sampled_or_done(client: farm.Farm, double: EngineDouble, batch_id: str, n_tokens: int) -> bool:
    return double.n_tokens >= n_tokens or client.status(batch_id).done
