"""verl's own agent loops compared with the farm's: the same tokens become the same batch.

`verl_own_loops.py FARM_URL ENGINE MODEL`, where ENGINE is the scripted engine's address and MODEL a folder with its
tokenizer. The farm runs rollouts; their recorded calls are then the answers of the LLM server of verl's
`SingleTurnAgentLoop` and `ToolAgentLoop`. Both become batches by verl's own worker.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from omegaconf import OmegaConf
from recorded_episodes import (  # type: ignore[import-not-found]
    LONG,
    PLAIN,
    TOOL,
    N,
    Recording,
    differing,
    problem,
)
from tensordict import TensorDict
from transformers import AutoTokenizer  # type: ignore[import-not-found, unused-ignore]
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.trainer.ppo import core_algos
from verl.workers.rollout.replica import TokenOutput

import farm
from farm.adapters.verl_agent_loops import FarmAgentLoopManager

URL, ENGINE, MODEL = sys.argv[1:4]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
PROMPT = 64
FAMILY = "qwen3"
"""The family of models, by verl's names, whose turns end like those of the scripted engine's template."""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "it"}}},
    },
}


class _Manager(FarmAgentLoopManager):
    connect = staticmethod(lambda: farm.connect(URL))
    run = "verl-own"
    settings = {"max_attempts": 1}  # noqa: RUF012
    pad_id = TOKENIZER.pad_token_id


class _Server:
    """The part of verl's `LLMServerClient` that its loops call."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        call = self.recording.answer(prompt_ids, sampling_params)
        return TokenOutput(
            token_ids=call.response_ids.tolist(),
            log_probs=call.response_logprobs.tolist(),
            stop_reason="completed",
            extra_fields={"min_global_steps": 7, "max_global_steps": 7},
        )


def config_of(response_length: int) -> Any:
    """Return verl's own defaults of a rollout, with these lengths."""
    from pathlib import Path

    import verl

    rollout = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/rollout/rollout.yaml")
    own = {"n": N, "prompt_length": PROMPT, "response_length": response_length, "mode": "async", "name": "vllm"}
    rollout = OmegaConf.merge(rollout, own, {"multi_turn": {"format": "hermes"}})
    rollout.pop("temperature"), rollout.pop("top_k"), rollout.pop("top_p")
    sampled = {"temperature": 1.0, "top_k": -1, "top_p": 1.0}
    rollout = OmegaConf.merge(rollout, sampled)
    return OmegaConf.create(
        {
            "trainer": {"project_name": "farm", "experiment_name": f"own-{response_length}"},
            "actor_rollout_ref": {"rollout": rollout},
            "data": {},
        }
    )


def prompts(question: str) -> DataProto:
    rows = DataProto(
        batch=TensorDict({"dummy_tensor": torch.zeros(1, 1)}, batch_size=1),
        non_tensor_batch={
            "uid": np.array(["u0"], dtype=object),
            "raw_prompt": np.array([[{"role": "user", "content": question}], None], dtype=object)[:1],
            "farm_instance": np.array([problem(question, ENGINE).model_dump()], dtype=object),
        },
        meta_info={"global_steps": 5},
    )
    return rows.repeat(N, interleave=True)


async def own_batch(
    config: Any, question: str, farm_batch: DataProto, kind: type[Any], client: Any
) -> tuple[Any, list[str]]:
    """Return the batch that verl's own worker makes from its own loop's result, and the differences of the loop."""
    worker = AgentLoopWorker.__new__(AgentLoopWorker)
    worker.rollout_config = SimpleNamespace(
        prompt_length=PROMPT, response_length=config.actor_rollout_ref.rollout.response_length
    )
    worker.tokenizer, worker.processor = TOKENIZER, None
    worker.reward_loop_worker_handles, worker.distillation_enabled, worker.mm_processor_kwargs = None, False, {}
    outputs, faults = [], []
    for rollout_id, reward in zip(
        farm_batch.non_tensor_batch["farm_rollout_id"], farm_batch.batch["rm_scores"].sum(-1).tolist(), strict=True
    ):
        recording = Recording(client.calls(rollout_id))

        def look(at: str, recording: Recording = recording) -> str:
            return str(recording.observation())

        tool = FunctionTool("look", look, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        loop = kind(
            DictConfigWrap(config),
            _Server(recording),
            TOKENIZER,
            None,
            object,
            DictConfigWrap(config.data),
            hf_model_type=FAMILY,
            **({"tools": ToolListWrap([tool])} if kind is ToolAgentLoop else {}),
        )
        # the farm's problem has no tool in its prompt
        loop.tool_schemas = []
        output = await loop.run({"temperature": 1.0}, raw_prompt=[{"role": "user", "content": question}])
        output.reward_score = reward
        faults += recording.faults
        outputs.append(await worker._agent_loop_postprocess(output, False, raw_prompt=None))
    return worker._postprocess(outputs), faults


def advantages(batch: Any) -> torch.Tensor:
    uids = np.repeat(["u0"], N)
    values, _ = core_algos.compute_grpo_outcome_advantage(batch["rm_scores"], batch["response_mask"], uids)
    return values


def compared(client: Any, question: str, response_length: int, kind: type[Any] = ToolAgentLoop) -> dict[str, Any]:
    """Compare the two batches of a problem."""
    config = config_of(response_length)
    ours = _Manager.create(config=config).generate_sequences(prompts(question))
    theirs, faults = asyncio.run(own_batch(config, question, ours, kind, client))
    tensors = {
        name: dict(batch.batch.items()) | {"advantages": advantages(batch.batch)}
        for name, batch in (("ours", ours), ("theirs", theirs))
    }
    return {
        "differing": differing(tensors["ours"], tensors["theirs"]),
        "turns": [sorted({int(n) for n in each.non_tensor_batch["__num_turns__"]}) for each in (ours, theirs)],
        "faults": faults,
        "rows": ours.batch["response_mask"].sum(-1).tolist(),
        "names": sorted(tensors["theirs"]),
        "lengths": [
            [len(list(each)) for _, each in groupby(row[: int(there.sum())].tolist())]
            for row, there in zip(ours.batch["response_mask"], ours.batch["attention_mask"][:, PROMPT:], strict=True)
        ],
    }


def main() -> None:
    """Compare each kind of episode; print the differences."""
    with farm.connect(URL) as client:
        facts = {
            "stop": compared(client, PLAIN, 48, SingleTurnAgentLoop),
            "cut": compared(client, LONG, 4, SingleTurnAgentLoop),
            "tool": compared(client, TOOL, 160),
        }
        turn, observation, last = facts["tool"]["lengths"][0]
        facts["cut_in_second_turn"] = compared(client, TOOL, turn + observation + last - 3)
        facts["full_after_tool"] = compared(client, TOOL, turn + observation - 1)
        facts["exactly_full_after_tool"] = compared(client, TOOL, turn + observation)
        facts["one_left_after_tool"] = compared(client, TOOL, turn + observation + 1)
        facts["cut_in_first_turn"] = compared(client, TOOL, turn - 1)
        facts["exactly_the_first_turn"] = compared(client, TOOL, turn)
    print(json.dumps(facts))


main()
