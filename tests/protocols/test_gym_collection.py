"""NeMo Gym's own collection on the farm: its types parse the answers, and a killed client gets its rollouts later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import farm
from farm.embedded.embedded_farm import Embedded
from tests.doubles import EngineDouble
from tests.protocols.conftest import QUESTION, Start, result_of
from tests.services.api import KEY, RestartableApi
from tests.services.farms import until

N = 3


def test_collection_gets_the_rollouts_that_it_began_before_it_was_killed(
    here: tuple[Embedded, RestartableApi],
    double: EngineDouble,
    engine: str,
    start: Start,
    root_port: int,
    tmp_path: Path,
) -> None:
    started, api = here
    params = {"input": [{"role": "user", "content": QUESTION}]}
    common: dict[str, Any] = {"responses_create_params": params, "policy_base_url": f"{engine}/v1"}
    chat = {**common, "agent_ref": {"name": "chat"}, "question": QUESTION, "expected": "three"}
    broken = {**common, "agent_ref": {"name": "noop"}, "fail": "run:agent_error"}
    rows = [{**chat, "_ng_task_index": 0, "_ng_rollout_index": index} for index in range(N)]
    rows += [{**broken, "_ng_task_index": 1, "_ng_rollout_index": 0, "_ng_rollout_id": "step1-1-0"}]
    given = {"host": f"farm:{KEY}@127.0.0.1", "port": root_port, "agents": ["chat", "noop"], "rows": rows}
    with farm.connect(started.home) as client:
        before = len(client.recent(100))
        killed = start("nemo-gym", "gym_collection", given)
        until(lambda: double.n_running == N or killed.poll() is not None, "all are sampled")
        killed.kill()
        api.kill()
        api.start()
        until(api.listens, "the API listens again")
        said = result_of(start("nemo-gym", "gym_collection", given), tmp_path / "gym_collection.err")
        assert len(client.recent(100)) - before == N + 1, "no request began a second rollout"
        scored = [result for result in said["results"] if "reward" in result]
        [failure] = [result for result in said["results"] if "reward" not in result]
        assert (failure["_ng_failure_class"], failure["mask_sample"]) == ("agent_run_error", True)
        assert said["status"] == "success"
        assert said["mean"] == said["own_mean"] == 1.0
        assert said["items"] == ["NeMoGymResponseOutputMessageForTraining"] * N
        for result in scored:
            [item] = result["response"]["output"]
            [segment] = next(
                rollout.segments
                for rollout in client.collect(result["rollout_id"].split(".")[0])
                if rollout.rollout_id == result["rollout_id"]
            )
            assert item["prompt_token_ids"] == segment.prompt_ids.tolist()
            assert item["generation_token_ids"] == segment.response_ids.tolist()
            assert len(item["generation_log_probs"]) == len(item["generation_token_ids"])
