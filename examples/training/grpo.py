"""GRPO with a farm, in one file: a model, an optimizer, and the client's public methods.

Groups are streamed as they finish and are trained as a whole. After each step the trainer writes a checkpoint, sends
the new weights to the engines, and acknowledges the groups. If it is killed at any line and started again, it resumes
from its checkpoint: the step's idempotency key names the batch that was submitted before, so finished rollouts are not
repeated.

`--mode off-policy` submits the next batch before it trains on this one, so that engines work during training: its
tokens are up to one version old, and `max_staleness=1` limits them to that. In both modes the importance ratio of a
token uses the log-probability that the engine recorded when it sampled it.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import torch  # type: ignore[import-not-found, unused-ignore]
from transformers import AutoModelForCausalLM  # type: ignore[import-not-found, unused-ignore]

import farm
from examples.training import reward_curve
from examples.training.file_chains import DATA_SOURCE, file_chains
from examples.training.reward_curve import Step
from farm.adapters.arrays import arrays
from farm.records.rollout import Group

Tensors: TypeAlias = Mapping[str, Any]
"""The arrays of `farm.adapters.arrays` as torch tensors, or the parameters of a model, by name."""

CLIP = (0.8, 1.28)
N_PASSES = 2


def main() -> None:
    options = _options()
    torch.manual_seed(options.seed)
    learner = Learner(options.policy, options.folder / "checkpoint.pt", options.learning_rate)
    with farm.connect(options.farm) as client:
        push_s = push(client, learner, options.folder)
        if learner.curve:
            reward_curve.write(learner.curve, options.folder)
        for step in range(learner.step + 1, options.steps + 1):
            began = time.monotonic()
            groups = list(client.stream_groups(submit(client, step, options)))
            rolled_out = time.monotonic()
            if options.mode == "off-policy" and step < options.steps:
                submit(client, step + 1, options)
            row = learner.learn(step, groups)
            times = {"rollout_s": rolled_out - began, "train_s": time.monotonic() - rolled_out, "push_s": push_s}
            learner.save(row | times)
            push_s = push(client, learner, options.folder)
            client.acknowledge(groups[-1])
            print(reward_curve.show(learner.curve[-1]), flush=True)
            reward_curve.write(learner.curve, options.folder)


def submit(client: farm.Farm, step: int, options: argparse.Namespace) -> str:
    """Submit the batch of a step, and return its id; a repeated submit returns the same batch."""
    chains = file_chains(options.seed, step, options.groups)
    request = farm.BatchRequest(
        instances=tuple(farm.Instance(data_source=DATA_SOURCE, fields=chain.fields) for chain in chains),
        n_samples=options.samples,
        sampling=farm.SamplingParams(temperature=1.0, max_tokens=12, seed=options.seed),
        limits=farm.Limits(max_turns=7, max_observation_chars=60),
        sandbox=options.sandbox,
        max_staleness=1 if options.mode == "off-policy" else 0,
        on_stale="restart",
        idempotency_key=f"{options.folder.name}/step-{step}",
    )
    return client.submit(request)


def push(client: farm.Farm, learner: Learner, folder: Path) -> float:
    """Send the weights of the last step to the engines as that version, while calls are paused. Returns the seconds."""
    began = time.monotonic()
    weights = (folder / "weights" / str(learner.step)).absolute()
    learner.model.save_pretrained(weights)
    with client.weight_update(learner.step, mode="keep", path=weights) as engines:
        for engine in engines:
            server = engine.url.removesuffix("/v1")
            load = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
            httpx2.post(f"{server}/collective_rpc", json=load, timeout=120).raise_for_status()
            reset = f"{server}/reset_prefix_cache?reset_running_requests=true"
            httpx2.post(reset, timeout=120).raise_for_status()
    for older in weights.parent.iterdir():
        if older != weights:
            shutil.rmtree(older)
    return time.monotonic() - began


class Learner:
    """The model and the rest of a checkpoint: the optimizer, the last step, the curve, the newest weights."""

    def __init__(self, policy: Path, checkpoint: Path, learning_rate: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        self.step = 0
        self.curve: list[Step] = []
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._versions: dict[int, Tensors] = {0: self._weights()}
        self._checkpoint = checkpoint
        if checkpoint.exists():
            self._load()

    def learn(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Train a step, and return its row of the curve. A group with a broken rollout is not trained on."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        made = arrays(rollouts, whole_groups=True, min_version=min(self._versions))
        if not len(made):
            causes = sorted({str(rollout.outcome) for rollout in rollouts})
            raise SystemExit(f"step {step}: no group is complete and has known weights: {', '.join(causes)}")
        rows, advantages = made.as_torch(), torch.from_numpy(made.group_advantages())
        sampled = rows["response_mask"] == 1
        gap = self._largest_gap(rows)
        for _ in range(N_PASSES):
            new = log_probabilities(self.model, dict(self.model.named_parameters()), rows)
            loss = grpo_loss(new, rows["response_logprobs"], advantages, sampled)
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
        self.step = step
        # a token of the next batch was sampled by one of these versions
        self._versions = {step - 1: self._versions[step - 1], step: self._weights()}
        return reward_curve.summary(step, rollouts, made, gap)

    def _largest_gap(self, rows: Tensors) -> float:
        """Return the largest difference between an engine's log-probability and ours, with the weights of the token."""
        largest = 0.0
        sampled = rows["response_mask"] == 1
        for version in rows["policy_versions"][sampled].unique().tolist():
            with torch.no_grad():
                ours = log_probabilities(self.model, self._versions[version], rows)
            by_it = sampled & (rows["policy_versions"] == version)
            largest = max(largest, float((ours - rows["response_logprobs"])[by_it].abs().max()))
        return largest

    def save(self, row: Step) -> None:
        """Write the checkpoint, with this row of the curve, atomically: a kill leaves this one or the previous one."""
        self.curve.append(row)
        state = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": self.step}
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state | {"versions": self._versions, "curve": self.curve}, partial)
        partial.replace(self._checkpoint)

    def _load(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.curve, self._versions = state["step"], state["curve"], state["versions"]
        print(f"going on after step {self.step}", flush=True)

    def _weights(self) -> Tensors:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def log_probabilities(model: Any, weights: Tensors, rows: Tensors) -> Any:
    """Return the log-probability of each response token under these weights of the model, [n, R]."""
    ids = torch.cat([rows["prompt_ids"], rows["response_ids"]], 1).long()
    mask = torch.cat([rows["prompt_mask"], rows["attention_mask"]], 1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    n = rows["response_ids"].shape[1]
    logits = torch.func.functional_call(model, weights, (), inputs).logits[:, -n - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, -n:, None])[..., 0]


def grpo_loss(new: Any, old: Any, advantages: Any, sampled: Any) -> Any:
    """Return the negated mean of the clipped objective over sampled tokens, [n, R] (arXiv:2402.03300, 2503.14476)."""
    ratio, advantage = (new - old).exp(), advantages[:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(*CLIP) * advantage)
    return -gain[sampled].mean()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a policy on `follow the files` through a farm.")
    parser.add_argument("folder", type=Path, help="of the run: checkpoint, weights, curve; its name names the batches")
    parser.add_argument("--farm", required=True, help="the address of the farm, such as http://HOST:8600")
    parser.add_argument("--policy", type=Path, required=True, help="the folder of the model to begin with")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--mode", choices=("sync", "off-policy"), default="sync")
    parser.add_argument("--groups", type=int, default=16, help="problems of a step")
    parser.add_argument("--samples", type=int, default=8, help="rollouts of a problem")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--sandbox", default="namespace")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
