"""Agent Lightning's own rollout manager on the farm: it trains on the tokens that the farm sampled."""

from __future__ import annotations

from pathlib import Path

import farm
from farm.embedded.embedded_farm import Embedded
from tests.doubles import EngineDouble
from tests.protocols.conftest import QUESTION, Start, result_of
from tests.services.api import KEY, RestartableApi

N = 3


def test_manager_gets_triplets_and_rewards(
    here: tuple[Embedded, RestartableApi], double: EngineDouble, engine: str, start: Start, tmp_path: Path
) -> None:
    started, api = here
    chat = {"question": QUESTION, "expected": "three"}
    given = {
        "url": f"{api.url}/agent-lightning",
        "key": KEY,
        "model": double.machine.name,
        "address": engine.removeprefix("http://"),
        "n": N,
        "data": {"data_source": ["chat", "noop"], "fields": [chat, {"fail": "run:agent_error"}]},
    }
    trainer = start("agent-lightning", "lightning_trainer", given)
    with farm.connect(started.home) as client:
        completed = result_of(trainer, tmp_path / "lightning_trainer.err")
        chats = [each for each in completed if each["reward"] is not None]
        broke = [each for each in completed if each["reward"] is None]
        assert [(each["state"], each["reward"], each["waited"]) for each in chats] == [("succeeded", 1.0, True)] * N
        assert [(each["state"], each["triplets"]) for each in broke] == [("failed", [])] * N
        assert all("agent_error" in each["error"] for each in broke)
        batches = client.recent(100)
        assert len(batches) == 2 * N, "no request began a second rollout"
        segments = [each for batch in batches for rollout in client.collect(batch) for each in rollout.segments]
        expected = sorted([each.prompt_ids.tolist(), each.response_ids.tolist()] for each in segments)
        assert sorted(triplet[:2] for each in chats for triplet in each["triplets"]) == expected
        assert all(len(triplet[1]) == len(triplet[2]) for each in chats for triplet in each["triplets"])
        assert client.engines() == [], "its servers have ended"
