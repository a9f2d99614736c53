"""verl with a farm for its agent loops: the manager for its configuration, and a data set for it.

    python examples/trainers/verl_farm.py examples/problems.jsonl train.parquet   # writes the data set
    PYTHONPATH=examples/trainers python -m verl.trainer.main_ppo data.train_files=train.parquet \
        +actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_farm.Manager \
        data.return_raw_chat=True actor_rollout_ref.rollout.calculate_log_probs=True ...

The farm's address is FARM_STORE_URL, as for every client.
"""

from __future__ import annotations

import sys
from pathlib import Path

import farm
from farm.adapters.verl_agent_loops import FarmAgentLoopManager


class Manager(FarmAgentLoopManager):
    """Runs the prompts of the column `farm_instance`."""

    connect = staticmethod(farm.connect)
    run = "verl-example"
    settings = {"limits": farm.Limits(max_turns=8, max_tokens=2048)}  # noqa: RUF012
    too_long = "cut"


def write_data_set(problems: Path, parquet: Path) -> None:
    """Convert instances, one JSON object per line, to verl's data set."""
    import pandas  # type: ignore[import-untyped, unused-ignore]

    instances = [farm.Instance.model_validate_json(line) for line in problems.read_text().splitlines()]
    rows = [
        {
            "prompt": [{"role": "user", "content": instance.instance_id}],
            "data_source": instance.data_source,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
            "farm_instance": instance.model_dump_json(),
        }
        for index, instance in enumerate(instances)
    ]
    pandas.DataFrame(rows).to_parquet(parquet)


if __name__ == "__main__":
    write_data_set(Path(sys.argv[1]), Path(sys.argv[2]))
