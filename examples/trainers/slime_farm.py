"""slime, or miles, with a farm for its rollouts: the functions for its options, and a data set for them.

    python examples/trainers/slime_farm.py examples/problems.jsonl train.jsonl   # writes the data set
    PYTHONPATH=examples/trainers python train.py --prompt-data train.jsonl --input-key prompt --metadata-key metadata \
        --rollout-function-path slime_farm.generate_rollout \
        --eval-function-path slime.rollout.sglang_rollout.generate_rollout \
        --custom-generate-function-path slime_farm.generate ...

The farm's address is FARM_STORE_URL, as for every client.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import farm
from farm.adapters.slime import generate_function, rollout_function

OPTIONS: dict[str, Any] = {
    "too_long": "cut",
    "settings": {"limits": farm.Limits(max_turns=8, max_tokens=2048)},
}
generate_rollout = rollout_function(farm.connect, "slime-example", **OPTIONS)
generate = generate_function(farm.connect, "slime-example-eval", **OPTIONS)


def write_data_set(problems: Path, target: Path) -> None:
    """Convert instances, one JSON object per line, to slime's data set."""
    with target.open("w") as file:
        for line in problems.read_text().splitlines():
            instance = farm.Instance.model_validate_json(line)
            metadata = {"farm_instance": instance.model_dump_json()}
            file.write(json.dumps({"prompt": instance.instance_id, "metadata": metadata}) + "\n")


if __name__ == "__main__":
    write_data_set(Path(sys.argv[1]), Path(sys.argv[2]))
