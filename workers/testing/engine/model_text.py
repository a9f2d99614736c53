"""The text side of the double's model: a real tokenizer, created in a moment, and a chat template.

The tokenizer is a byte-level BPE like those of large models: it splits any text, is exact for any bytes, and allows
several splits of a text: random ids mostly differ from the encoding of their text.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from workers.testing.engine.corpus import CORPUS

START = "<|im_start|>"
END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END)
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""One id each, but not special: they are part of the sampled text."""

VOCABULARY_SIZE = 768
_TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def write_model_text(folder: Path) -> None:
    """Write `tokenizer.json`, its configuration, the chat template and the generation configuration to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer))
    _write_json(folder / "generation_config.json", _generation_config(tokenizer))
    (folder / "chat_template.jinja").write_text(template(), encoding="utf-8")


def template() -> str:
    """Return the chat template's source, with Hermes tool calls."""
    return _TEMPLATE.read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def make_tokenizer() -> Tokenizer:
    """Return VOCABULARY_SIZE ids: 256 bytes, merges, then special tokens and marks. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    n_added = len(SPECIAL_TOKENS) + len(MARKS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - n_added,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKS])
    return tokenizer


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": text in SPECIAL_TOKENS,
            }
            for text in (*SPECIAL_TOKENS, *MARKS)
        },
        "additional_special_tokens": [START, END],
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131_072,
    }


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps(value, indent=2, ensure_ascii=False)}\n", encoding="utf-8")
