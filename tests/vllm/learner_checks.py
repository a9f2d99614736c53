"""Values of the trainer's parts for `test_learner.py`, from vLLM's Python, which has torch: prints a JSON object.

`python -m tests.vllm.learner_checks FOLDER`; the folder is empty.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

from examples.training import tiny_policy
from examples.training.behaviour_cloning import episode, teacher
from examples.training.file_chains import FileChain
from examples.training.grpo import Learner, grpo_loss, log_probabilities
from farm.adapters.arrays import arrays
from farm.records.rollout import Group
from tests.unit.farm.adapters.ended_rollout import rollout

CHAIN = FileChain({"a": "b", "b": "c", "c": "d"}, "a", 2, "c")


def losses() -> dict[str, Any]:
    """Ratios 2 and 0.5, and a third token that was not sampled, with the advantages 1 and -1."""
    old = torch.tensor([[0.25, 1.0, 0.1]]).log()
    sampled = torch.tensor([[True, True, False]])
    result: dict[str, Any] = {}
    for name, advantage in (("up", 1.0), ("down", -1.0)):
        new = torch.tensor([[0.5, 0.5, 0.9]]).log().requires_grad_()
        loss = grpo_loss(new, old, torch.tensor([advantage]), sampled)
        loss.backward()
        result[name] = {"loss": loss.item(), "gradient": new.grad[0].tolist()}
    return result


def padding() -> float:
    """Return the largest difference of log-probabilities between rows in one padded batch and each row alone."""
    torch.manual_seed(0)
    words = tiny_policy.tokenizer()
    model = tiny_policy.untrained_model(words)
    weights = dict(model.named_parameters())
    rollouts = [rollout(0, 0, 2), rollout(1, 0, 7), rollout(1, 1, 4)]
    together = log_probabilities(model, weights, arrays(rollouts).as_torch())
    differences = []
    for row, each in enumerate(rollouts):
        alone = log_probabilities(model, weights, arrays([each]).as_torch())[0]
        differences.append(float((together[row, : len(alone)] - alone).abs().max()))
    return max(differences)


def checkpoint(folder: Path) -> dict[str, Any]:
    """A learner that took a step, and one that continues from its checkpoint."""
    words = tiny_policy.tokenizer()
    tiny_policy.untrained_model(words).save_pretrained(folder / "policy")
    first = Learner(folder / "policy", folder / "checkpoint.pt", 1e-3)
    rollouts = tuple(rollout(0, sample, 3 + sample, float(sample == 1)) for sample in range(3))
    versions = {version for each in rollouts for row in each.segments for version in row.policy_versions.tolist()}
    [version] = versions - {-1}
    step = version + 1
    first._versions = {version: first._versions[0]}
    row = first.learn(step, [Group("b.0", rollouts)])
    first.save(row)
    second = Learner(folder / "policy", folder / "checkpoint.pt", 1e-3)
    equal = all(
        torch.equal(one, other)
        for one, other in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    )
    return {
        "equal": equal,
        "step": second.step == step,
        "curve": second.curve == [row],
        "versions": sorted(second._versions) == [version, step],
        "finite": math.isfinite(row["largest_gap"]),
        "files": sorted(path.name for path in folder.iterdir()),
    }


def cloning() -> dict[str, Any]:
    """The teacher's runs, and those of an episode's tokens that the policy must say."""
    from random import Random

    words = tiny_policy.tokenizer()
    episodes = [teacher(CHAIN, Random(seed)) for seed in range(400)]
    ids, said = episode(words, CHAIN, Random(0))
    template = words.apply_chat_template(
        [{"role": "user", "content": CHAIN.request}], add_generation_prompt=True, tokenize=False
    )
    return {
        "hops": {str(n): sum(len(episode) - 1 == n for episode in episodes) for n in range(5)},
        "said": words.decode([token for token, mask in zip(ids, said, strict=True) if mask]),
        "begins": words.decode(ids).startswith(template),
        "n_tokens": len(words),
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "losses": losses(),
                "padding": padding(),
                "checkpoint": checkpoint(Path(sys.argv[1])),
                "cloning": cloning(),
            }
        )
    )
