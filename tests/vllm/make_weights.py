"""Writes a tiny model with random weights into folders with its tokenizer, other weights into each.

`python make_weights.py CONTEXT_TOKENS FOLDER...`, in vLLM's Python.

A Qwen2-type model of half a million parameters; its output is noise, but all processing by a server is real.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM  # type: ignore[import-not-found]


def make(folder: Path, seed: int, context_tokens: int) -> None:
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=generation["eos_token_id"],
        pad_token_id=generation.get("pad_token_id"),
    )
    model = Qwen2ForCausalLM(config)
    # The likeliest tokens are far above 0, so that sampling seldom ends by itself.
    with torch.no_grad():
        model.lm_head.weight[generation["eos_token_id"]] = 0.0
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1), encoding="utf-8")


if __name__ == "__main__":
    for number, name in enumerate(sys.argv[2:]):
        make(Path(name), number, int(sys.argv[1]))
