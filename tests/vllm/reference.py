"""Reference output of a model by transformers: `python reference.py FOLDER... PROMPT_JSON N`, in vLLM's Python.

Prints for each folder the N likeliest tokens after the prompt, one after the other, with their log-probabilities.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch  # type: ignore[import-not-found]
from transformers import Qwen2ForCausalLM  # type: ignore[import-not-found]


def greedy(folder: str, prompt: list[int], n: int) -> dict[str, Any]:
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids, logprobs = list(prompt), []
    for _ in range(n):
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], dim=-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return {"ids": ids[len(prompt) :], "logprobs": logprobs}


if __name__ == "__main__":
    *folders, prompt_json, count = sys.argv[1:]
    print(json.dumps([greedy(folder, json.loads(prompt_json), int(count)) for folder in folders]))
