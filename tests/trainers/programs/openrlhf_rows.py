"""OpenRLHF's own records and advantages of the farm's rollouts: `openrlhf_rows.py FARM_URL`.

OpenRLHF imports packages for GPUs that it does not use here; empty modules replace them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

from absent_modules import leave_out  # type: ignore[import-not-found]

leave_out("vllm", "flash_attn", "deepspeed", "optree", "peft", "bitsandbytes")

import torch  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402
from problems_of_tests import breaking, chat  # type: ignore[import-not-found]  # noqa: E402

import farm  # noqa: E402
from examples.trainers.openrlhf_farm import AgentExecutor  # noqa: E402
from farm.adapters.conformance.adapter_promises import every_kind  # noqa: E402
from farm.adapters.openrlhf import response_fields  # noqa: E402
from farm.errors import InvalidRequest  # noqa: E402

N = 4
MAX_LENGTH = 512
TOKENIZER = SimpleNamespace(eos_token_id=2, pad_token_id=0)
SAMPLING = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=64, logprobs=1)


class _AgentExecutor(AgentExecutor):
    connect = staticmethod(lambda: farm.connect(sys.argv[1]))  # type: ignore[assignment]
    too_long = "error"  # type: ignore[assignment]
    settings = {"max_attempts": 1}  # noqa: RUF012


def main() -> None:
    executor = _AgentExecutor()
    labels = [instance.model_dump_json() for instance in (chat("a"), breaking("b"), chat("c"))]
    responses = asyncio.run(executed(executor, labels))
    experiences = [
        SamplesGenerator._process_response_into_experience(None, each, max_len=MAX_LENGTH) for each in responses
    ]
    for number, experience in enumerate(experiences):
        experience.index = [number]
    whole = Experience.concat_experiences(experiences, 0)
    facts = {
        "rewards": whole.rewards.tolist(),
        "trained_tokens": whole.action_mask.sum(1).tolist(),
        "shapes": [list(getattr(whole, name).shape) for name in ("action_mask", "rollout_log_probs")],
        "off_mask": float((whole.rollout_log_probs * ~whole.action_mask.bool()).abs().sum()),
        "advantages": {
            name: advantages(whole, name) for name in ("group_norm", "dr_grpo", "rloo", "reinforce_baseline")
        },
        "constructed": constructed(),
        "too_long": refused(labels[0]),
        "bounded": bounded(labels[0]),
        "asked": first_sampling(labels[0]),
        "kept": kept(responses),
    }
    print(json.dumps(facts))


async def executed(executor: Any, labels: list[str]) -> list[dict[str, Any]]:
    """Call the executor as OpenRLHF's actor does: all samples of each prompt at once."""
    calls = [
        executor.execute(f"prompt {number}", label, SAMPLING, MAX_LENGTH, TOKENIZER, None)
        for number, label in enumerate(labels)
        for _ in range(N)
    ]
    return list(await asyncio.gather(*calls))


def advantages(whole: Any, estimator: str) -> list[float]:
    """Return the largest advantage of each row by OpenRLHF's own estimator."""
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=N),
        reward=SimpleNamespace(clip_range=None),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=True),
            kl=SimpleNamespace(init_coef=0.0),
        ),
    )
    from openrlhf.trainer.ppo_utils import experience_maker

    experience_maker.apply_length_penalties = lambda *_: None
    maker = SimpleNamespace(strategy=SimpleNamespace(args=args), advantage_estimator=estimator, args=args)
    maker.kl_ctl = SimpleNamespace(value=0.0)
    maker.get_cumulative_returns = lambda *words: RemoteExperienceMaker.get_cumulative_returns(maker, *words)
    whole.kl = torch.zeros(whole.action_mask.shape)
    (done,) = RemoteExperienceMaker.compute_advantages_and_returns(maker, [whole])
    assert bool(torch.isfinite(done.advantages).all())
    masked = done.advantages * done.action_mask
    return [round(float(row[row.abs().argmax()]), 6) for row in masked]


def kept(responses: list[dict[str, Any]]) -> list[str]:
    """Return the prompts whose samples OpenRLHF's own loop keeps, filtering groups by their scores."""
    from openrlhf.trainer.ppo_utils import samples_generator

    groups = [responses[start : start + N] for start in range(0, len(responses), N)]
    varied = [
        [{**group[0], "scores": 0.0}, {**group[1], "scores": 1.0}, *group[2:]] for group in (groups[0], groups[2])
    ]
    samples_generator.ray = SimpleNamespace(wait=lambda refs, **_: (refs[:1], refs[1:]), get=lambda ref: ref)
    loader = iter([("", [f"prompt {n}"], ["label"], [None]) for n in range(3)])
    waiting = [varied[0], groups[1], varied[1]]
    options = SimpleNamespace(dynamic_filtering_range=[0.0, 1.0])
    loop = SimpleNamespace(args=SimpleNamespace(algo=options))
    loop._dispatch_prompts_to_vllm = lambda prompts, labels, **_: [waiting.pop(0) for _ in prompts]
    loop._process_response_into_experience = lambda response, **words: (
        SamplesGenerator._process_response_into_experience(None, response, **words)
    )
    experiences, _, _ = SamplesGenerator._generate_vllm(loop, loader, 3, True, max_len=MAX_LENGTH)
    return [each.prompts[0] for each in experiences]


def constructed() -> list[int]:
    """Return the training tokens of rollouts of every kind, by OpenRLHF's mask and by ours."""
    counts = []
    for rollout in every_kind():
        for segment in rollout.segments if rollout.trainable else ():
            if segment.trainable:
                fields = response_fields(rollout, segment, 1.0) | {"prompt": "", "label": ""}
                experience = SamplesGenerator._process_response_into_experience(None, fields, max_len=10_000)
                mask = torch.cat([torch.zeros(len(segment.prompt_ids)), torch.tensor(segment.response_mask.tolist())])[
                    1:
                ]
                assert torch.equal(experience.action_mask[0].float(), mask)
                logprobs = torch.tensor(segment.response_logprobs.tolist())
                assert torch.equal(experience.rollout_log_probs[0][-len(logprobs) :], logprobs)
                counts.append(int(mask.sum()))
    return counts


def first_sampling(label: str) -> dict[str, Any]:
    """Return the sampling parameters of a rollout's first call."""
    wanted = SimpleNamespace(**vars(SAMPLING), min_tokens=1, min_p=0.1, skip_special_tokens=False)
    response = asyncio.run(_AgentExecutor().execute("asked", label, wanted, MAX_LENGTH, TOKENIZER, None))
    assert response["reward"] is not None
    with farm.connect(sys.argv[1]) as client:
        batch = client.batches(1)[0].batch_id
        (rollout,) = client.collect(batch)
        return dict(client.calls(rollout.rollout_id)[0].sampling)


class _LongRows(_AgentExecutor):
    settings = {"max_attempts": 1, "limits": {"max_row_tokens": 4096}}  # noqa: RUF012


def bounded(label: str) -> list[Any]:
    """Return the length of a row, and if it was cut short, where OpenRLHF's rows are shorter than an answer."""
    prompt = asyncio.run(_AgentExecutor().execute("p", label, SAMPLING, 512, TOKENIZER, None))["action_ranges"][0][0]
    response = asyncio.run(_AgentExecutor().execute("p", label, SAMPLING, prompt + 2, TOKENIZER, None))
    return [len(response["observation_tokens"]) - prompt, response["truncated"]]


def refused(label: str) -> str:
    try:
        asyncio.run(_LongRows().execute("p", label, SAMPLING, 4, TOKENIZER, None))
    except InvalidRequest as error:
        return error.field
    return ""


main()
