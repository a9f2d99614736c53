"""SkyRL with a farm as its generator: an entry point, and a data set for it.

    python examples/trainers/skyrl_farm.py examples/problems.jsonl train.parquet   # writes the data set
    python examples/trainers/skyrl_farm.py data.train_data="['train.parquet']" generator.max_turns=8 ...

The farm's address is FARM_STORE_URL, as for every client.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import farm
from farm.adapters.skyrl import FarmGenerator


def main() -> None:
    """Train, as SkyRL's own entry point does."""
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    class FarmExp(BasePPOExp):  # type: ignore[misc, unused-ignore]
        """SkyRL's experiment, with the farm's generator."""

        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> FarmGenerator:
            return farm_generator(cfg, tokenizer, inference_engine_client)

    @ray.remote(num_cpus=1)  # type: ignore[untyped-decorator, unused-ignore]
    def train(cfg: Any) -> None:
        FarmExp(cfg).run()

    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(train.remote(cfg))


def farm_generator(cfg: Any, tokenizer: Any, inference_engine_client: Any) -> FarmGenerator:
    """Return the generator for a SkyRL configuration."""
    return FarmGenerator(
        farm.connect(),
        cfg.generator,
        run="skyrl-example",
        max_seq_len=cfg.trainer.algorithm.max_seq_len,
        tokenizer=tokenizer,
        too_long="cut",
        inference_engine_client=inference_engine_client,
    )


def write_data_set(problems: Path, parquet: Path) -> None:
    """Convert instances, one JSON object per line, to SkyRL's data set."""
    import pandas  # type: ignore[import-untyped, unused-ignore]

    instances = [farm.Instance.model_validate_json(line) for line in problems.read_text().splitlines()]
    rows = [
        {
            "prompt": [{"role": "user", "content": instance.instance_id}],
            "env_class": "farm",
            "farm_instance": instance.model_dump_json(),
        }
        for instance in instances
    ]
    pandas.DataFrame(rows).to_parquet(parquet)


if __name__ == "__main__":
    if sys.argv[1].endswith(".jsonl"):
        write_data_set(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
