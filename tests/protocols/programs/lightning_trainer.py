"""The rollout side of Agent Lightning's trainer, by its own manager: register, enqueue, wait, pause and drain."""

import json
import sys
import time

from agentlightning.verl.agl_rollout_manager import AglRolloutManager

given = json.loads(sys.argv[1])
manager = AglRolloutManager(
    agl_base_url=given["url"],
    agl_key=given["key"],
    model=given["model"],
    step=1,
    train_rollout_n=given["n"],
    rollout_timeout_seconds=300,
    poll_interval_seconds=0.2,
)
manager.client.post_with_retry("/proxy/resume")
manager.delete_model()
manager.register_model([given["address"]])
completed = manager.enqueue_and_wait_until_completed(given["data"], is_train=True)
inflight = manager.client.post_with_retry("/proxy/pause", json={"reason": "step 1"}, timeout=300.0).json()["inflight"]
while inflight > 0:
    time.sleep(0.25)
    inflight = manager.client.get("/proxy/state").json()["inflight"]
manager.client.post_with_retry("/proxy/resume")
manager.delete_model()
print(
    json.dumps(
        [
            {
                "id": each.rollout_id,
                "state": each.rollout_state,
                "reward": each.final_reward,
                "error": each.error_message,
                "triplets": [
                    [triplet.prompt["token_ids"], triplet.response["token_ids"], triplet.response["log_probs"]]
                    for triplet in each.triplets or []
                ],
                "waited": (each.finished_at or 0) >= (each.running_at or 0) > 0,
            }
            for each in completed
        ]
    )
)
