"""Agent Lightning's own example for GSM8K: its data set, configuration, trainer and loop, on rollouts of the farm.

Parts that need a GPU are replaced: verl's engines are the given one, log probabilities are those of the sampling, and
the policy is not changed.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentlightning.verl.dataset import LoadedDataset
from agentlightning.verl.trainer import AgentLightningRayPPOTrainer
from datasets import Dataset
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.main_ppo import TaskRunner, create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.tokenizer import hf_tokenizer

farm_url, source, model, engine, questions = sys.argv[1:]
spec = importlib.util.spec_from_file_location("train_gsm8k_agent", Path(source) / "train_gsm8k_agent.py")
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


class EngineAddresses:
    """The engines of verl: one, which verl did not start."""

    def get_addresses(self) -> list[str]:
        return [engine.removeprefix("http://").removesuffix("/v1")]

    def get_replicas(self) -> list[Any]:
        return []


class Checkpoints:
    """The weights of the engines, which are not changed."""

    def __init__(self) -> None:
        self.n_updates = 0

    def update_weights(self, step: int) -> None:
        self.n_updates += 1

    def sleep_replicas(self) -> None:
        pass


class CpuTrainer(AgentLightningRayPPOTrainer):  # type: ignore[misc]
    """The trainer of the package without the workers that have the policy."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.llm_server_manager = EngineAddresses()
        self.checkpoint_manager = Checkpoints()
        # one worker has the whole policy
        self.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
        self.trained: list[dict[str, Any]] = []
        self.n_carried: list[int] = []

    def _load_checkpoint(self) -> None:
        pass

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        return DataProto.from_dict({"old_log_probs": batch.batch["rollout_log_probs"]}), 0.0

    def _update_actor(self, batch: DataProto) -> DataProto:
        self.n_carried.append(len(self._carry_over_rollouts))
        for index in range(len(batch)):
            row = batch.batch[index]
            n_prompt = row["prompts"].shape[0]
            mask = row["attention_mask"].bool()
            self.trained.append(
                {
                    "prompt": row["prompts"][mask[:n_prompt]].tolist(),
                    "response": row["responses"][mask[n_prompt:]].tolist(),
                    "sampled": int(row["response_mask"].sum()),
                    "log_probs": row["rollout_log_probs"][mask[n_prompt:]].tolist(),
                    "reward": float(row["token_level_scores"].sum()),
                    "advantage": float(row["advantages"][row["response_mask"].bool()].sum()),
                    "group": batch.non_tensor_batch["uid"][index],
                    "step": self.global_steps,
                }
            )
        return DataProto(meta_info={"metrics": {"actor/loss": [0.0]}})


def train(*changes: str) -> dict[str, Any]:
    """Run the loop of the example to its end."""
    rows = [{"question": each, "answer": "Three of them.\n#### 3"} for each in json.loads(questions)]
    Dataset.from_list(rows).to_parquet("rows.parquet")
    # the line that a user adds to the example
    data = [{**row, "data_source": "answer"} for row in example.load_gsm8k_dataset("rows.parquet")]
    config = example.build_config(
        model=model,
        agl_base_url=f"{farm_url}/agent-lightning",
        agl_key=os.environ["FARM_API_KEY"],
        config_overrides=[
            "agentlightning.local.agent_class=null",
            "trainer.logger=[console]",
            "trainer.total_training_steps=3",
            "trainer.test_freq=3",
            "trainer.device=cpu",
            "data.train_batch_size=4",
            "data.val_batch_size=4",
            "data.dataloader_num_workers=0",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            *changes,
        ],
    )
    OmegaConf.resolve(config)
    runner = TaskRunner()
    _, worker_group = runner.add_actor_rollout_worker(config)
    trainer = CpuTrainer(
        config=config,
        tokenizer=hf_tokenizer(model),
        processor=None,
        role_worker_mapping=runner.role_worker_mapping,
        resource_pool_manager=runner.init_resource_pool_mgr(config),
        ray_worker_group_cls=worker_group,
        train_dataset=LoadedDataset(data),
        val_dataset=LoadedDataset(data[:4]),
        collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, LoadedDataset(data)),
    )
    trainer.fit()
    return {
        "rows": trainer.trained,
        "carried": trainer.n_carried,
        "n_updates": trainer.checkpoint_manager.n_updates,
        "validation": trainer._validate(),
    }


facts = {
    "in_steps": train(),
    "asynchronous": train(
        "agentlightning.async_rollout.enabled=true", "agentlightning.async_rollout.async_train_batch_size=6"
    ),
}
print(json.dumps(facts))
