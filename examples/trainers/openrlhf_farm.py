"""OpenRLHF with a farm as its agent: the file for its option, which also writes a data set for it.

    python examples/trainers/openrlhf_farm.py examples/problems.jsonl train.jsonl   # writes the data set
    python -m openrlhf.cli.train_ppo_ray --train.agent_func_path examples/trainers/openrlhf_farm.py \
        --data.prompt_dataset train.jsonl --data.input_key prompt --data.label_key farm_instance ...

The farm's address is FARM_STORE_URL, as for every client.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import farm
from farm.adapters.openrlhf_executor import FarmAgentExecutor


class AgentExecutor(FarmAgentExecutor):
    """Runs the instance that is a prompt's label."""

    connect = staticmethod(farm.connect)
    run = "openrlhf-example"
    settings = {"limits": farm.Limits(max_turns=8, max_tokens=2048)}  # noqa: RUF012
    too_long = "cut"


def write_data_set(problems: Path, target: Path) -> None:
    """Convert instances, one JSON object per line, to OpenRLHF's data set."""
    with target.open("w") as file:
        for line in problems.read_text().splitlines():
            instance = farm.Instance.model_validate_json(line)
            row = {"prompt": instance.instance_id, "farm_instance": instance.model_dump_json()}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write_data_set(Path(sys.argv[1]), Path(sys.argv[2]))
