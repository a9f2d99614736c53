"""The text side of the double's model: a real tokenizer, created in a moment, and a chat template.

The tokenizer is a byte-level BPE like those of large models: it splits any text, is exact for any bytes, and allows
several splits of a text: random ids mostly differ from the encoding of their text. Changing the
text on which it is trained changes it: previously recorded ids then have other meanings.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PROSE = """\
The farm plays every rollout in a sandbox of its own: the policy reads the problem, calls a tool, reads what the tool
gave back, and goes on until it submits an answer. I will look at the files first, then write a test that fails, then
mend the function, and then run all of the tests again. Let me compute it. Let me think about this step by step.
The answer is the sum of the two numbers. You are a helpful assistant. You may call one or more functions to assist
with the user query. Here are the tools that you can use. What is the greatest common divisor of the numbers below?
Give your final answer between the answer tags: <answer>42</answer>. I am not sure whether this is right, so I check it.
Die Straße führt über den Fluss; où est la bibliothèque? Größe, Übung, café, naïve. 今天天气很好。
我们去公园。 Привет, мир!
"""

CODE = """\
from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def solution(numbers: Sequence[int], threshold: float = 0.5) -> list[int]:
    \"\"\"Return the numbers that are larger than the threshold, in order.\"\"\"
    result: list[int] = []
    for index, number in enumerate(numbers):
        if number > threshold and index % 2 == 0:
            result.append(number)
    return result


class Counter:
    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, int] = {}

    def add(self, key: str, value: int = 1) -> None:
        self.values[key] = self.values.get(key, 0) + value
        if self.values[key] is None:
            raise ValueError(f"no value for {key}")


if __name__ == "__main__":
    print(json.dumps({"numbers": solution([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])}), file=sys.stderr)
    assert solution([1, 2, 3]) == [1, 3], "the function is wrong"
"""

SHELL = """\
$ cd /workspace && ls -la && cat solution.py | head -20
$ grep -rn "def test_" tests/ | wc -l
$ git status && git diff --stat && git log --oneline | head -3
$ PYTHONPATH=/workspace python3 -m pytest -q tests/test_solution.py 2>&1 | tail -3
FAILED tests/test_solution.py::test_one - AssertionError: assert 2 == 3
Traceback (most recent call last):
  File "/workspace/solution.py", line 12, in <module>
ModuleNotFoundError: No module named 'solution'
exit code 1
drwxr-xr-x 2 root root 4096 Nov 21 17:12 .
"""

CALLS = """\
{"type": "function", "function": {"name": "bash", "description": "Run a command in a persistent shell.", "parameters": \
{"type": "object", "properties": {"command": {"type": "string"}, "timeout_s": {"type": "number", "default": 60}}, \
"required": ["command"], "additionalProperties": false}}}
{"name": "bash", "arguments": {"command": "ls -la"}}
{"name": "python", "arguments": {"code": "print(sum(range(10)))"}}
{"name": "submit", "arguments": {"answer": "42"}}
{"name": "search", "arguments": {"query": "how to read a file", "limit": 10}}
[1, 2, 3] [true, false, null] 0.25 -17 1e-3 1995 2024 100 1000
"""

CORPUS: tuple[str, ...] = tuple(f"{PROSE}{CODE}{SHELL}{CALLS}".splitlines(keepends=True))


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
    _write_json(
        folder / "generation_config.json",
        (
            {
                "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)],
                "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
            }
        ),
    )
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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps(value, indent=2, ensure_ascii=False)}\n", encoding="utf-8")
