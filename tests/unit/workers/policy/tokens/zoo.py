"""Models for tests: the templates of `tests/data/templates`, each with a tokenizer trained here, in a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from farm.records.trajectory import Message
from workers.policy.tokens.template import ChatTemplate
from workers.policy.tokens.tokenizer import ModelText, Tokenizer

TEMPLATES = Path(__file__).parents[4] / "data" / "templates"
_CORPUS = [
    "the tool answered with a list of files and the user asked what to do next, so the model thought about it",
    '{"name": "search", "arguments": {"query": "the end of the list", "limit": 5}}',
    "def total(values):\n    return sum(values)\n\nassistant user system tool result",
    "été 漢字 🎉 ñandú Ελληνικά",
] * 8


@dataclass(frozen=True)
class Model:
    """One model of the zoo, and what its template can show."""

    name: str
    specials: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str = ""
    tools: bool = True
    parallel: bool = True
    tool_text: bool = True
    thinks: bool = False
    sentencepiece: bool = False

    @property
    def eos(self) -> str:
        return self.ends[0] if self.ends else ""

    def source(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text()

    def text(self) -> ModelText:
        return _text(self)


@cache
def _text(model: Model) -> ModelText:
    backend = trained(model.specials, sentencepiece=model.sentencepiece)
    ends = [number for end in model.ends if (number := backend.token_to_id(end)) is not None]
    specials = {"bos_token": model.bos, "eos_token": model.eos}
    template = ChatTemplate(model.source(), {key: text for key, text in specials.items() if text}, model.name)
    return ModelText(Tokenizer(backend, ends), template, model.name)


@cache
def trained(specials: tuple[str, ...], *, sentencepiece: bool = False) -> tokenizers.Tokenizer:
    """A BPE tokenizer of a few hundred tokens: byte-level, or sentencepiece-like with byte fallback."""
    backend = tokenizers.Tokenizer(
        models.BPE(byte_fallback=sentencepiece, unk_token="<unk>" if sentencepiece else None)
    )
    if sentencepiece:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=700, special_tokens=["<unk>", *specials, *fallback], show_progress=False
        )
    else:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=list(specials),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    backend.train_from_iterator(_CORPUS, trainer)
    return _with_plain_bytes(backend) if sentencepiece else backend


def _with_plain_bytes(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The trainer makes its byte tokens special; in published files they are plain vocabulary."""
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end"),
        *("tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end"),
        *("tool▁output▁begin", "tool▁output▁end"),
    )
)
_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
_MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
)
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_HARMONY = (
    "<|startoftext|>", "<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>",
)  # fmt: skip

CHATML = Model("chatml", _IM, ("<|im_end|>", "<|endoftext|>"))
QWEN3 = Model("qwen3", _IM, ("<|im_end|>", "<|endoftext|>"), thinks=True)
DEEPSEEK_R1 = Model("deepseek_r1", _DEEPSEEK, (_DEEPSEEK[1],), bos=_DEEPSEEK[0], thinks=True)
LLAMA31 = Model(
    "llama31", _LLAMA, ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), bos=_LLAMA[0], parallel=False, tool_text=False
)
MISTRAL_V7 = Model("mistral_v7", _MISTRAL, ("</s>",), bos="<s>", tool_text=False, sentencepiece=True)
GEMMA = Model("gemma", _GEMMA, ("<eos>", "<end_of_turn>"), bos="<bos>", tools=False, sentencepiece=True)
HERMES = Model("hermes", ("<s>", *_IM), ("<|im_end|>",), bos="<s>", tool_text=False)
HARMONY = Model("harmony", _HARMONY, ("<|return|>", "<|call|>"), parallel=False, tool_text=False, thinks=True)
GLM = Model("glm", _GLM, ("<|endoftext|>", "<|user|>", "<|observation|>"))
DEEPSEEK_V31 = Model("deepseek_v31", (*_DEEPSEEK, "</think>"), (_DEEPSEEK[1],), bos=_DEEPSEEK[0])
PLAIN = Model("plain", ("<|endoftext|>",), ())
ROUNDS = Model("rounds", ("</s>",), ("</s>",), tools=False)

ALL = (CHATML, QWEN3, DEEPSEEK_R1, LLAMA31, MISTRAL_V7, GEMMA, HERMES, HARMONY, GLM, DEEPSEEK_V31, PLAIN, ROUNDS)

SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the files.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def assistant(text: str | None, calls: Sequence[Message] = (), reasoning: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(call_id: str, arguments: str = '{"query": "x"}', name: str = "search") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(call_id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
