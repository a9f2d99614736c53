"""Finds the weights that sampled a token, by its log-probability; runs in a Python with torch and transformers.

`python -m benchmarks.token_weights shift POLICY OTHER` writes a second set of weights to OTHER: those of POLICY with
some noise, and the same tokenizer. `python -m benchmarks.token_weights judge EVEN ODD ROWS` reads training rows from a
file of numpy, computes the log-probability of each sampled token under the weights of EVEN, if its version is an even
number, or ODD, and prints a JSON object: the largest gap to those recorded, and the median gap under the other weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from transformers import AutoModelForCausalLM  # type: ignore[import-not-found, unused-ignore]

from examples.training.grpo import log_probabilities

_NOISE = 0.02
_ROWS = 64
"""Rows per computation."""


def shift(policy: Path, other: Path) -> None:
    """Write the second set of weights."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += _NOISE * torch.randn(parameter.shape)
    shutil.copytree(policy, other)
    model.save_pretrained(other)


def judge(even: Path, odd: Path, rows: Path) -> dict[str, float]:
    """Return the gaps of all sampled tokens, and their number."""
    tensors = {name: torch.from_numpy(value) for name, value in np.load(rows).items()}
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (even, odd)]
    own, other = [], []
    for first in range(0, len(tensors["response_ids"]), _ROWS):
        part = {name: value[first : first + _ROWS] for name, value in tensors.items()}
        sampled = part["response_mask"] == 1
        gaps = torch.stack([_gaps(model, part) for model in models])
        is_odd = (part["policy_versions"] % 2)[None].long()
        own.append(gaps.gather(0, is_odd)[0][sampled])
        other.append(gaps.gather(0, 1 - is_odd)[0][sampled])
    mine, theirs = torch.cat(own), torch.cat(other)
    return {"largest": float(mine.max()), "other_median": float(theirs.median()), "n_tokens": len(mine)}


def _gaps(model: Any, rows: dict[str, Any]) -> Any:
    with torch.no_grad():
        computed = log_probabilities(model, dict(model.named_parameters()), rows)
    return (computed - rows["response_logprobs"]).abs()


if __name__ == "__main__":
    torch.set_num_threads(1)
    verb, *paths = sys.argv[1:]
    if verb == "shift":
        shift(Path(paths[0]), Path(paths[1]))
    else:
        print(json.dumps(judge(*map(Path, paths))))
