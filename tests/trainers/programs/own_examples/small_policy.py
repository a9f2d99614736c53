"""A policy of random weights for the tokenizer of the scripted engine."""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
)


def write_policy(model_text: str, folder: str) -> None:
    """Write it to a folder, with the tokenizer of `model_text`."""
    tokenizer = AutoTokenizer.from_pretrained(model_text)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
