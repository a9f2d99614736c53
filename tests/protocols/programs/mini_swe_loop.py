"""The command of mini-swe-agent, as its users start it; prints at last how its trajectory ended."""

import json
import os
import sys
from pathlib import Path

given = json.loads(sys.argv[1])
os.environ.update(
    {
        "FARM_API_KEY": given["key"],
        "SWE_REX_LOG_STREAM_LEVEL": "ERROR",
        "OPENAI_API_KEY": "none",
        "OPENAI_API_BASE": given["engine"],
        "MSWEA_CONFIGURED": "true",
        "MSWEA_GLOBAL_CONFIG_DIR": given["folder"],
        # otherwise it tries for seconds to fetch a list of prices
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
)
sys.path.insert(0, given["examples"])
from minisweagent.run.mini import app  # noqa: E402 - its settings are read when it is imported

output = Path(given["folder"], "trajectory.json")
app([*given["arguments"], "-o", str(output)], standalone_mode=False)
trajectory = json.loads(output.read_text())
extras = [message.get("extra", {}) for message in trajectory["messages"]]
outputs = [{"code": extra["returncode"], "output": extra["raw_output"]} for extra in extras if "returncode" in extra]
print(
    json.dumps(
        {"end": trajectory["info"]["exit_status"], "submission": trajectory["info"]["submission"], "outputs": outputs}
    )
)
