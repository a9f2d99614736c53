"""verl's own records, padding, advantages and loss on the farm's rollouts: `verl_batches.py FARM_URL`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from omegaconf import OmegaConf
from problems_of_tests import breaking, chat  # type: ignore[import-not-found]
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo import core_algos

import farm
from examples.trainers.verl_farm import Manager
from farm.adapters.conformance.adapter_promises import every_kind
from farm.adapters.single_row import rows_of_step, with_experts
from farm.adapters.verl import output_fields
from farm.adapters.verl_agent_loops import agent_loop_output, data_proto, transfer_fields
from farm.errors import InvalidRequest
from farm.records.experts.routed_experts import RowExperts

N = 4
PROMPT, RESPONSE = 64, 48
CONFIG = OmegaConf.create(
    {
        "trainer": {"project_name": "farm", "experiment_name": "verl"},
        "actor_rollout_ref": {
            "rollout": {
                "n": N,
                "prompt_length": PROMPT,
                "response_length": RESPONSE,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "val_kwargs": {"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1},
            }
        },
    }
)


class _Manager(Manager):
    connect = staticmethod(lambda: farm.connect(sys.argv[1]))  # type: ignore[assignment]
    run = ""
    settings = {"max_attempts": 1}  # noqa: RUF012
    too_long = "error"  # type: ignore[assignment]
    name_weights = True


def main() -> None:
    manager = _Manager.create(config=CONFIG, llm_client=None, teacher_client=None, reward_loop_worker_handles=[])
    output = manager.generate_sequences(prompts())
    again = _Manager.create(config=CONFIG, llm_client=None).generate_sequences(prompts())
    facts = {
        **described(output),
        "versions": sorted({each for each in output.non_tensor_batch["max_global_steps"].tolist() if each is not None}),
        "same_when_again": output.non_tensor_batch["farm_rollout_id"].tolist()
        == again.non_tensor_batch["farm_rollout_id"].tolist(),
        "as_verls_worker": as_verls_worker(),
        "union": sorted(prompts().union(output).batch.keys())[:2],
        "too_long": too_long(),
        "bounded": bounded(),
        "experts": experts(),
    }
    print(json.dumps(facts))


def prompts() -> DataProto:
    """The prompts of a step as verl's trainer repeats them."""
    instances = [chat("a"), breaking("b"), chat("c")]
    rows = DataProto(
        batch=TensorDict({"dummy_tensor": torch.zeros(3, 1)}, batch_size=3),
        non_tensor_batch={
            "uid": np.array(["u0", "u1", "u2"], dtype=object),
            "raw_prompt": np.array([[{"role": "user", "content": str(n)}] for n in range(3)] + [None], dtype=object)[
                :3
            ],
            "farm_instance": np.array([each.model_dump() for each in instances], dtype=object),
        },
        meta_info={"global_steps": 5},
    )
    return rows.repeat(N, interleave=True)


def described(output: DataProto) -> dict[str, Any]:
    """Return the batch's advantages and loss by verl's own functions, and their handling of the broken group."""
    batch = output.batch
    mask, scores = batch["response_mask"], batch["rm_scores"].sum(-1)
    uids = np.repeat(["u0", "u1", "u2"], N)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(batch["rm_scores"], mask, uids)
    log_prob = (batch["rollout_log_probs"] + 0.01).requires_grad_()
    ratio = torch.exp(log_prob - batch["rollout_log_probs"])
    losses = {
        mode: core_algos.agg_loss(-advantages * ratio, mask, mode)
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    }
    sum(losses.values()).backward()
    assert all(bool(torch.isfinite(loss)) for loss in losses.values())
    return {
        "scores": scores.tolist(),
        "trained_tokens": mask.sum(-1).tolist(),
        "broken_gradient": float(log_prob.grad[N : 2 * N].abs().sum()),
        "gradient": float(log_prob.grad.abs().sum()),
        "broken_advantage": float(advantages[N : 2 * N].abs().sum()),
    }


def as_verls_worker(routed: bool = False) -> dict[str, Any]:
    """Compare our batch of rollouts of every kind with the one that verl's own worker pads from the same rows."""
    step_rows = [row for row in rows_of_step(every_kind()) if len(row.segments[0].response_ids) < RESPONSE]
    if routed:
        step_rows = routed_rows(step_rows)
    worker = AgentLoopWorker.__new__(AgentLoopWorker)
    worker.rollout_config = SimpleNamespace(prompt_length=PROMPT, response_length=RESPONSE)
    worker.tokenizer = Pads()
    worker.processor, worker.reward_loop_worker_handles, worker.distillation_enabled = None, None, False
    worker.mm_processor_kwargs = {}
    import asyncio

    async def padded() -> list[Any]:
        outputs = [agent_loop_output(output_fields(row.rollout, row.segments[0], row.reward)) for row in step_rows]
        return [await worker._agent_loop_postprocess(each, False, raw_prompt=None) for each in outputs]

    theirs = worker._postprocess(asyncio.run(padded()))
    ours = data_proto(step_rows, PROMPT, RESPONSE, {"raw_prompt": np.array([None] * len(step_rows), dtype=object)}, 9)
    return {
        "tensors": {
            name: bool(torch.equal(ours.batch[name], value)) and ours.batch[name].dtype == value.dtype
            for name, value in theirs.batch.items()
        },
        "missing": sorted({*theirs.non_tensor_batch} - {*ours.non_tensor_batch}),
        "differing": sorted(
            name for name, values in theirs.non_tensor_batch.items()
            if name in ours.non_tensor_batch and values.tolist() != ours.non_tensor_batch[name].tolist()
        ),
        "extra_keys": [ours.meta_info["reward_extra_keys"], theirs.meta_info["reward_extra_keys"]],
    }  # fmt: skip


def experts() -> dict[str, Any]:
    """Run a step with routing replay; return ids and experts of each row of V0's batch, and of a row of V1's."""
    folder = Path("model")
    folder.mkdir()
    form = {"num_hidden_layers": 2, "num_experts_per_tok": 4, "num_experts": 300}
    folder.joinpath("config.json").write_text(json.dumps({"model_type": "qwen3_moe", **form}))
    asked = {"rollout": {"enable_rollout_routing_replay": True}, "model": {"path": str(folder)}}
    config = OmegaConf.merge(CONFIG, {"actor_rollout_ref": asked})
    manager = _Manager.create(config=config)
    batch = manager.generate_sequences(prompts()).batch
    rows = []
    for index in range(len(batch)):
        there = batch["attention_mask"][index].bool()
        of_row = batch["routed_experts"][index]
        assert not of_row[~there].any()
        rows.append([batch["input_ids"][index][there].tolist(), of_row[there].tolist()])
    client, newest = manager.client, manager.client.batches(1)[0].batch_id
    (row,) = with_experts(rows_of_step(client.collect(newest)[:1]), (2, 4), "")
    output = agent_loop_output(output_fields(row.rollout, row.segments[0], row.reward))
    moved = transfer_fields(output, {})
    return {
        "rows": rows,
        "type": str(batch["routed_experts"].dtype),
        "v1": [moved["input_ids"].tolist(), moved["routed_experts"].tolist()],
        "v1_type": str(moved["routed_experts"].dtype),
        "validated": "routed_experts" in manager.generate_sequences(validation()).batch,
        "as_verls_worker": as_verls_worker(routed=True)["tensors"],
    }


def validation() -> DataProto:
    rows = prompts()
    rows.meta_info["validate"] = True
    return rows


def routed_rows(step_rows: list[Any]) -> list[Any]:
    """Return the rows with random experts, as an engine would return them."""
    draw = np.random.default_rng(0)

    def drawn(segment: Any) -> Any:
        n = len(segment.prompt_ids) + len(segment.response_ids)
        flat, known = draw.integers(0, 300, n * 6).astype(np.uint16), np.ones(n, np.uint8)
        flat[-6:], known[-1] = 0, 0
        return replace(segment, routed_experts=RowExperts(flat, 2, 3, known))

    return [replace(row, segments=tuple(map(drawn, row.segments))) for row in step_rows]


class Pads:
    """Pads like a tokenizer of transformers, which verl calls for it."""

    pad_token_id = 9
    padding_side = "left"

    def pad(self, encoded: dict[str, list[int]], *, max_length: int, **_: Any) -> dict[str, torch.Tensor]:
        ids = encoded["input_ids"]
        fill = [9] * (max_length - len(ids))
        left = self.padding_side == "left"
        values, there = (fill + ids, [0] * len(fill) + [1] * len(ids)) if left else (
            ids + fill, [1] * len(ids) + [0] * len(fill))  # fmt: skip
        return {"input_ids": torch.tensor(values), "attention_mask": torch.tensor(there)}


class _LongRows(_Manager):
    settings = {"max_attempts": 1, "limits": {"max_response_tokens": 64, "max_tokens": 64}}  # noqa: RUF012


def short() -> Any:
    return OmegaConf.merge(CONFIG, {"actor_rollout_ref": {"rollout": {"response_length": 1}}})


def bounded() -> int:
    """Return the most tokens of a response where verl's arrays are shorter than an answer."""
    output = _Manager.create(config=short()).generate_sequences(prompts())
    return int(output.batch["response_mask"].sum(1).max())


def too_long() -> str:
    try:
        _LongRows.create(config=short()).generate_sequences(prompts())
    except InvalidRequest as error:
        return error.field
    return ""


main()
