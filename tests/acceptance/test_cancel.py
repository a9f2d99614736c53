"""Cancel of a rollout, a group or a batch: wherever it is on whichever node, it ends with everything it started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.records.node import UP
from farm.records.rollout import Stage, State
from farm.store import nodes
from farm.store.database import Store
from testkit.deadline import LONG_S
from testkit.postgres import postgres_database
from tests.doubles import EngineDouble
from tests.services.farms import NOOP, farm_folder, left_of, node, until
from tests.services.servers.redis import redis_server
from tests.services.unruly import installed_in
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

SLEEPS = ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": "sleep 600"}),))
SCRIPT = Script([ScriptedProblem(match="sleep", branches=(Branch(name="sleep", turns=(SLEEPS,)),))])
IN_SANDBOX = {"data_source": "working", "fields": {"question": "sleep"}}
IN_ENGINE = {"data_source": "chat", "fields": {"question": "think", "expected": "x"}}
IN_INIT = {"data_source": "unruly", "fields": {"fault": "prepare:hang", "where": "host"}}
IN_EVAL = {"data_source": "unruly", "fields": {"fault": "evaluate:hang"}}
LIMITS = {"init_s": 600, "run_s": 600, "eval_s": 600, "tool_s": 600}
QUEUED = {"data_source": "noop", "fields": {"seconds": 600}}


@dataclass
class TwoNodeFarm:
    """A farm of two nodes; `slow` is an engine whose calls never end."""

    client: farm.Farm
    slow: EngineDouble
    folder: Path

    def is_active(self, batch_id: str, stage: Stage, n: int) -> bool:
        return self.client.status(batch_id).stages[stage][State.ACTIVE] == n

    def progress(self, name: str, batch_id: str) -> str:
        result = [f"{each.stage} {each.state} {each.failure or ''}" for each in self.client.rollouts(batch_id)]
        return f"{name} is under way: {result}"

    def sandboxes(self) -> list[Path]:
        return list((self.folder / "scratch").glob("*/sandboxes/[!.]*"))


@pytest.fixture(scope="module")
def nodes_of_two(postgres_url: str, migrated_postgres: str) -> Iterator[tuple[Store, str, EngineDouble, Path]]:
    """Yield their store, their broker, the engine whose calls never end, and their folder."""
    slow = EngineDouble(SCRIPT, model="slow")
    with ExitStack() as stack:
        store = Store(stack.enter_context(postgres_database(postgres_url, migrated_postgres)))
        # a separate Redis: the one of the run is emptied for each test
        broker_url = stack.enter_context(redis_server())
        folder = stack.enter_context(farm_folder())
        engines = {
            "fast": stack.enter_context(serving(EngineDouble(SCRIPT, model="fast").app())),
            "slow": stack.enter_context(serving(slow.app())),
        }
        env = installed_in(folder) | {"FARM_WARM_POOL": "0"}
        for name in ("one", "two"):
            stack.enter_context(node(folder, name, store.url, broker_url, 0.0, **env))
        client = stack.enter_context(farm.connect(store.url, broker_url=broker_url))
        for model, url in engines.items():
            client.add_engine(f"{url}/v1", model)
        stack.callback(store.close)
        until(lambda: [each.state for each in store.read(nodes.listing)] == [UP] * 2, "both nodes are up", 120)
        # the farm has probed the engine and uses it; from now on, no call there ends
        client.collect(client.submit({"instances": [IN_ENGINE], "model": "slow"}), timeout_s=LONG_S)
        slow.scheduler.speed = replace(slow.scheduler.speed, latency_s=600.0)
        yield store, broker_url, slow, folder
    assert left_of(folder) == []


@pytest.fixture(params=["told", "untold"])
def two_nodes(
    request: pytest.FixtureRequest, nodes_of_two: tuple[Store, str, EngineDouble, Path]
) -> Iterator[TwoNodeFarm]:
    """Workers always reach a Redis. The client does, too, or has only the database: then it sends no notification."""
    store, broker_url, slow, folder = nodes_of_two
    with farm.connect(store.url, broker_url=broker_url if request.param == "told" else "") as client:
        yield TwoNodeFarm(client, slow, folder)


def test_cancelled_rollouts_end_in_every_stage(two_nodes: TwoNodeFarm) -> None:
    client = two_nodes.client
    ids: dict[str, str] = {}
    result: dict[str, Any] = {
        "sandbox": {"instances": [IN_SANDBOX], "n_samples": 2, "model": "fast"},
        "engine": {"instances": [IN_ENGINE, IN_ENGINE], "n_samples": 2, "model": "slow"},
        "init": {"instances": [IN_INIT] * 2},
        "eval": {"instances": [IN_EVAL] * 2},
    }
    for name, request in result.items():
        ids[name] = client.submit(request | {"limits": LIMITS})
    waited_for = {"sandbox": (2, Stage.RUN), "engine": (4, Stage.RUN), "init": (2, Stage.INIT), "eval": (2, Stage.EVAL)}
    for name, (n, stage) in waited_for.items():
        until(partial(two_nodes.is_active, ids[name], stage, n), partial(two_nodes.progress, name, ids[name]), 120)
    # these take all free slots, and more
    ids["queued"] = client.submit({"instances": [QUEUED] * 60})
    until(lambda: two_nodes.slow.n_running == 4, lambda: f"the engine is at work, not {two_nodes.slow.n_running}", 120)
    until(lambda: all(client.calls(f"{ids['sandbox']}.0.{k}") for k in range(2)), "the first calls are recorded", 120)
    until(
        lambda: {"one", "two"} <= {each.node for each in client.rollouts(ids["queued"])}, "both nodes run rollouts", 120
    )

    one = f"{ids['engine']}.0.1"
    assert client.cancel(one) == [one]
    until(lambda: two_nodes.slow.n_running == 3, "its call is closed")
    group = f"{ids['engine']}.1"
    assert client.cancel(group) == [f"{group}.0", f"{group}.1"]
    until(lambda: two_nodes.slow.n_running == 1, "their calls are closed")
    for batch_id in ids.values():
        client.cancel(batch_id)
    until(lambda: two_nodes.slow.n_running == 0, "all calls are closed")
    until(lambda: not two_nodes.sandboxes(), "all sandboxes are gone")
    assert all(client.cancel(batch_id) == [] for batch_id in ids.values()), "once more does nothing"

    for batch_id in ids.values():
        rollouts = client.collect(batch_id, timeout_s=0)
        assert {(each.state, each.outcome) for each in rollouts} == {(State.CANCELLED, "cancelled")}
        assert not any(each.trainable for each in rollouts)
        assert client.violations(batch_id) == []
    assert all(len(each.segments) == 1 for each in client.collect(ids["sandbox"])), "what was recorded comes with them"
    assert not any(each.segments for each in client.collect(ids["engine"]))
    # every slot is free again
    freed = client.submit({"instances": [NOOP] * 64})
    assert {each.state for each in client.collect(freed, timeout_s=LONG_S)} == {State.COMPLETED}
