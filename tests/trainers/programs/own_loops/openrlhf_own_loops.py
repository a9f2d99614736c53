"""OpenRLHF's own executors compared with the farm's: the same tokens become the same experience.

`openrlhf_own_loops.py FARM_URL ENGINE MODEL`, where ENGINE is the scripted engine's address and MODEL a folder with its
tokenizer. The farm runs rollouts; their recorded calls are then the answers of the engine of `SingleTurnAgentExecutor`
and `MultiTurnAgentExecutor`, and the environment's replies are the feedback of an `AgentInstance`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar

from absent_modules import leave_out  # type: ignore[import-not-found]

leave_out("vllm", "flash_attn", "deepspeed", "optree", "peft", "bitsandbytes")

import torch  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from openrlhf.trainer.ppo_utils import experience_maker  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402
from openrlhf.utils.agent import (  # noqa: E402
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    SingleTurnAgentExecutor,
)
from recorded_episodes import (  # type: ignore[import-not-found]  # noqa: E402
    LONG,
    PLAIN,
    TOOL,
    N,
    Recording,
    differing,
    problem,
)
from transformers import AutoTokenizer  # type: ignore[import-not-found, unused-ignore]  # noqa: E402

import farm  # noqa: E402
from farm.adapters.openrlhf_executor import FarmAgentExecutor  # noqa: E402

URL, ENGINE, MODEL = sys.argv[1:4]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


class _FarmExecutor(FarmAgentExecutor):
    connect = staticmethod(lambda: farm.connect(URL))
    run = "openrlhf-own"
    settings: ClassVar[dict[str, Any]] = {"max_attempts": 1}


class _Engine:
    """The part of OpenRLHF's vLLM actor that its executors call."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    async def generate(self, prompt_ids: list[int], sampling_params: Any, **_: Any) -> Any:
        call = self.recording.answer(prompt_ids, vars(sampling_params))
        assert call.response_ids is not None
        assert call.response_logprobs is not None
        ids = call.response_ids.tolist()
        logprobs = [
            {token: SimpleNamespace(logprob=value)}
            for token, value in zip(ids, call.response_logprobs.tolist(), strict=True)
        ]
        text = TOKENIZER.decode(ids)
        output = SimpleNamespace(token_ids=ids, text=text, finish_reason=call.finish_reason, logprobs=logprobs)
        return SimpleNamespace(outputs=[output])


class _Feedback(AgentInstanceBase):  # type: ignore[misc, unused-ignore]
    """Returns the replies of the farm's environment, as text, and the farm's rewards."""

    recording: ClassVar[Recording]
    reward: ClassVar[float]

    def __init__(self) -> None:
        self.n_turns = 0

    async def step(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.n_turns += 1
        last = self.recording.calls[self.n_turns - 1]
        done = not last.observations
        said = "" if done else feedback_after(self.recording, self.n_turns - 1)
        # a full row ends without another step, so each step but the first brings the remaining reward
        reward = self.reward if self.n_turns == 1 else 0.0
        return {"rewards": torch.tensor(reward), "environment_feedback": said, "done": done}


def feedback_after(recording: Recording, place: int) -> str:
    """Return the text that follows a turn, which the chat template makes from the environment's reply."""
    message = recording.calls[place].observations[0]
    told = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    rendered = {"tokenize": False, "add_generation_prompt": False}
    before = TOKENIZER.apply_chat_template(told, **rendered)
    after = TOKENIZER.apply_chat_template([*told, message], **rendered | {"add_generation_prompt": True})
    # the end of the turn was sampled; the line break after it was not
    return str(after[len(before.removesuffix("\n")) :])


def experience_of(response: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Return the tensors that OpenRLHF itself makes of a response."""
    made = SamplesGenerator._process_response_into_experience(None, response, max_len=max_length)
    names = ("sequences", "attention_mask", "action_mask", "rollout_log_probs", "rewards", "scores")
    info = {name: made.info[name] for name in ("reward", "score", "response_clip_ratio")}
    return {name: getattr(made, name) for name in names} | info | {"truncated": response["truncated"]}


def advantages(responses: list[dict[str, Any]], max_length: int) -> torch.Tensor:
    """Return OpenRLHF's own advantages (`rloo`) of a group."""
    made = [SamplesGenerator._process_response_into_experience(None, each, max_len=max_length) for each in responses]
    for number, experience in enumerate(made):
        experience.index = [number]
    whole = Experience.concat_experiences(made, TOKENIZER.pad_token_id)
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=N),
        reward=SimpleNamespace(clip_range=None),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator="rloo", gamma=1.0, lambd=1.0, no_std_norm=True),
            kl=SimpleNamespace(init_coef=0.0),
        ),
    )
    experience_maker.apply_length_penalties = lambda *_: None
    maker = SimpleNamespace(strategy=SimpleNamespace(args=args), advantage_estimator="rloo", args=args)
    maker.kl_ctl = SimpleNamespace(value=0.0)
    own = experience_maker.RemoteExperienceMaker
    maker.get_cumulative_returns = lambda *words: own.get_cumulative_returns(maker, *words)
    whole.kl = torch.zeros(whole.action_mask.shape)
    (done,) = own.compute_advantages_and_returns(maker, [whole])
    return done.advantages * done.action_mask


def compared(client: Any, question: str, max_length: int, max_tokens: int | None = None) -> dict[str, Any]:
    """Compare the experiences of a problem's samples."""
    text = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    label = problem(question, ENGINE).model_dump_json()

    def sampling() -> Any:
        return SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=1, max_tokens=max_tokens, logprobs=1)

    async def run_result(executor: Any) -> list[dict[str, Any]]:
        calls = (executor.execute(text, label, sampling(), max_length, TOKENIZER, None) for _ in range(N))
        return list(await asyncio.gather(*calls))

    ours = asyncio.run(run_result(_FarmExecutor()))
    rollouts = client.collect(client.batches(1)[0].batch_id)
    theirs, faults = [], []
    allowed: list[list[int]] = [[], []]
    for rollout in rollouts:
        recording = Recording(client.calls(rollout.rollout_id))
        _Feedback.recording, _Feedback.reward = recording, rollout.reward
        one = SingleTurnAgentExecutor() if question != TOOL else MultiTurnAgentExecutor(_Feedback)
        response = asyncio.run(one.execute(text, label, sampling(), max_length, TOKENIZER, _Engine(recording)))
        if question != TOOL:
            # its reward is from a model, or a function
            response |= {"reward": rollout.reward, "scores": rollout.reward}
        theirs.append(response | {"extra_logs": {}})
        faults += recording.faults
        allowed[0] += [call.sampling["max_tokens"] for call in recording.calls[:1]]
        allowed[1] += [asked["max_tokens"] for asked in recording.asked[:1]]
    sides = [
        {
            f"{name} {place}": value
            for place, each in enumerate(side)
            for name, value in experience_of(each, max_length).items()
        }
        | {"advantages": advantages(side, max_length)}
        for side in (ours, theirs)
    ]
    mask = experience_of(ours[0], max_length)["action_mask"][0].tolist()
    lengths = [len(list(each)) for _, each in groupby(mask)]
    return {
        "differing": sorted({name.partition(" ")[0] for name in differing(*sides)}),
        "faults": faults,
        "lengths": lengths[1:],
        "n_prompt": lengths[0] + 1,
        "truncated": [sorted({each["truncated"] for each in side}) for side in (ours, theirs)],
        "allowed": [sorted(set(each)) for each in allowed],
    }


def main() -> None:
    """Compare each kind of episode; print the differences."""
    with farm.connect(URL) as client:
        facts = {
            "stop": compared(client, PLAIN, 512),
            "cut": compared(client, LONG, 512, 4),
            "tool": compared(client, TOOL, 512),
        }
        facts["limit_of_turns"] = compared(client, TOOL, 512, 96)
        facts["cut_by_length"] = compared(client, LONG, facts["cut"]["n_prompt"] + 3)
        n_prompt = facts["tool"]["n_prompt"]
        turn, observation, last = facts["tool"]["lengths"]
        facts |= {
            "cut_in_second_turn": compared(client, TOOL, n_prompt + turn + observation + last - 3),
            "one_left_after_tool": compared(client, TOOL, n_prompt + turn + observation + 1),
            "exactly_full_after_tool": compared(client, TOOL, n_prompt + turn + observation),
            "full_after_tool": compared(client, TOOL, n_prompt + turn + observation - 1),
        }
    print(json.dumps(facts))


main()
