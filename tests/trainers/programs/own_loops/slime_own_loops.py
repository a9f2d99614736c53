"""slime's own generation compared with the farm's: the same tokens become the same samples.

`slime_own_loops.py FARM_URL SLIME MODEL ENGINE`, where SLIME is the folder of its source, MODEL a folder with the
tokenizer and ENGINE the scripted engine's address. The farm runs rollouts; their recorded calls are then the answers of
SGLang's router to slime's own `generate`. slime's core has no loop of several turns.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from recorded_episodes import LONG, PLAIN, N, Recording, problem  # type: ignore[import-not-found]
from slime_evaluation import connect, parsed  # type: ignore[import-not-found]

ENGINE = sys.argv[4]

from slime.ray.rollout import RolloutManager  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from slime.rollout import sglang_rollout  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from slime.rollout.base_types import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    call_rollout_fn,
)
from slime.utils.types import Sample  # type: ignore[import-not-found, unused-ignore]  # noqa: E402

from farm.adapters.slime import rollout_function  # noqa: E402

FIELDS = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "reward", "weight_versions", "remove_sample")


class _Source:
    """A data source of one group."""

    def __init__(self, question: str) -> None:
        text = sglang_rollout.load_tokenizer(sys.argv[3]).apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        instance = problem(question, ENGINE).model_dump()
        self.group = [
            Sample(group_index=0, index=place, prompt=text, metadata={"farm_instance": instance}) for place in range(N)
        ]

    def get_samples(self, n: int) -> list[list[Any]]:
        return [copy.deepcopy(self.group) for _ in range(n)]


async def own_group(args: Any, group: list[Any], recordings: list[Recording]) -> list[Any]:
    """Return slime's samples of a group, by its own generation on an engine that answers as recorded."""
    waiting = iter(recordings)

    async def post(url: str, payload: dict[str, Any], headers: Any = None) -> dict[str, Any]:
        recording = next(waiting)
        call = recording.answer(payload["input_ids"], payload["sampling_params"])
        assert call.response_ids is not None
        assert call.response_logprobs is not None
        pairs = zip(call.response_logprobs.tolist(), call.response_ids.tolist(), strict=True)
        ends = {"finish_reason": {"type": call.finish_reason}, "weight_version": "7"}
        return {"text": "", "meta_info": {"output_token_logprobs": [[*pair, None] for pair in pairs], **ends}}

    sglang_rollout.post = post
    state = sglang_rollout.GenerateState(args)
    state.sampling_params["max_new_tokens"] = args.rollout_max_response_len
    done: list[Any] = await sglang_rollout.generate_and_rm_group(args, group, state.sampling_params.copy())
    return done


def normalized(args: Any, samples: list[Any]) -> list[float]:
    """Return slime's own normalization of the rewards of a batch."""
    manager = SimpleNamespace(args=args, custom_reward_post_process_func=None)
    _, rewards = RolloutManager.__ray_metadata__.modified_class._post_process_rewards(manager, samples)
    return [float(reward) for reward in rewards]


def compared(question: str, longest: int) -> dict[str, Any]:
    """Compare the samples of a group."""
    lengths = ("--rollout-max-response-len", str(longest), "--n-samples-per-prompt", str(N))
    args = parsed("--rollout-batch-size", "1", *lengths)
    function = rollout_function(connect, f"slime-own-{longest}", settings={"max_attempts": 1})
    source = _Source(question)
    (ours,) = call_rollout_fn(function, args, 0, source, evaluation=False).samples
    args.custom_generate_function_path, args.sglang_router_ip, args.sglang_router_port = None, "none", 0
    with connect() as client:
        recordings = [Recording(client.calls(sample.metadata["farm_rollout_id"])) for sample in ours]
    group = copy.deepcopy(source.group)
    for sample, farm_sample in zip(group, ours, strict=True):
        # its reward is from a function
        sample.reward = farm_sample.reward
    theirs = asyncio.run(own_group(args, group, recordings))
    pairs = list(zip(ours, theirs, strict=True))
    differing = {name for one, other in pairs for name in FIELDS if getattr(one, name) != getattr(other, name)}
    if any(one.status is not other.status for one, other in pairs):
        differing.add("status")
    if normalized(args, ours) != normalized(args, theirs):
        differing.add("normalized rewards")
    return {
        "differing": sorted(differing),
        "faults": [fault for recording in recordings for fault in recording.faults],
        "status": sorted({sample.status.value for sample in ours}),
        "lengths": [sample.response_length for sample in ours],
        "masks": [[sample.loss_mask for sample in side] for side in (ours, theirs)],
    }


def main() -> None:
    """Compare each kind of episode; print the differences."""
    print(json.dumps({"stop": compared(PLAIN, 48), "cut": compared(LONG, 4)}))


main()
