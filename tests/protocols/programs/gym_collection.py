"""NeMo Gym's own collection of rollouts, from a head server that returns the farm's address."""

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nemo_gym.base_resources_server import BaseVerifyResponse
from nemo_gym.config_types import AggregateMetrics, BaseServerConfig
from nemo_gym.reward_profile import compute_aggregate_metrics
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import get_response_json

given = json.loads(sys.argv[1])
place = {"host": given["host"], "port": given["port"]}
CONFIG = {name: {"responses_api_agents": {"farm": place}} for name in given["agents"]}
CONFIG |= {
    f"{name}_env": {"environment_servers": {"farm": {**place, "agent_server": {"name": name}}}}
    for name in given["agents"]
}


class Head(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(CONFIG).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


head = ThreadingHTTPServer(("127.0.0.1", 0), Head)
threading.Thread(target=head.serve_forever, daemon=True).start()
config = BaseServerConfig(host="127.0.0.1", port=head.server_port)


async def collect() -> dict[str, Any]:
    helper = RolloutCollectionHelper()
    results = []
    for future in helper.run_examples(given["rows"], head_server_config=config, route_failures_to_sidecar=True):
        _, result = await future
        results.append(result)
    client = helper.setup_server_client(config)
    answer = await client.post(f"{given['agents'][0]}_env", "/aggregate_metrics", json={"verify_responses": results})
    metrics = AggregateMetrics.model_validate(await get_response_json(answer))
    scored = [BaseVerifyResponse.model_validate(result) for result in results if "reward" in result]
    own = compute_aggregate_metrics([result for result in results if "reward" in result])
    return {
        "status": client.poll_for_status(f"{given['agents'][0]}_env"),
        "results": results,
        "items": [type(item).__name__ for each in scored for item in each.response.output],
        "mean": metrics.key_metrics["mean/reward"],
        "own_mean": own.key_metrics["mean/reward"],
    }


print(json.dumps(asyncio.run(collect())))
