"""A policy that learns on a CPU in minutes: a Qwen2-type model of 0.7 million parameters, and its tokenizer.

Of the 270 tokens, 256 are bytes and three are special. The others are the complete strings of an episode, so that a
tool call takes only six tokens and is still text that any server can parse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from examples.training.turn_text import CALL, CALL_END, CONTEXT_TOKENS, TURN_BEGIN, TURN_END

_PAD = "<|endoftext|>"
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_WHOLE = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *(CALL.removeprefix("<tool_call>"), CALL_END.removesuffix("</tool_call>")),
    *("assistant", "user", "follow ", " hops ", "answer "),
)


def tokenizer() -> Any:
    """Return the tokenizer, with the chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, eos_token=TURN_END, pad_token=_PAD, model_max_length=CONTEXT_TOKENS
    )
    special = [AddedToken(text, special=True, normalized=False) for text in (_PAD, TURN_BEGIN, TURN_END)]
    made.add_tokens(special + [AddedToken(text, special=False, normalized=False) for text in _WHOLE])
    made.chat_template = _TEMPLATE.read_text(encoding="utf-8")
    return made


def untrained_model(words: Any) -> Any:
    """Return the model with random weights, for this tokenizer."""
    ends = {
        "eos_token_id": words.convert_tokens_to_ids(TURN_END),
        "pad_token_id": words.convert_tokens_to_ids(_PAD),
    }
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model
