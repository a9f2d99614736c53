# ruff: noqa: E402, RUF001
"""Parse texts with the tool-call parsers of vLLM, SGLang and renderers: lines of JSON in, lines of JSON out.

Run by the Python that has these packages, not by the farm's. A line in is {format, text, tools}; a line out has, for
each package that knows the format, the calls as [name, arguments]: arguments are an object, or null if the package
reports the call as malformed. An exception of a package replaces the calls.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
logging.disable(logging.CRITICAL)

from renderers import parsing
from renderers.base import ToolCallParseStatus
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

VLLM = {
    **{"hermes": "hermes", "qwen_xml": "qwen3_coder", "llama3_json": "llama3_json", "mistral": "mistral"},
    **{"deepseek": "deepseek_v31", "deepseek_v32": "deepseek_v32", "pythonic": "pythonic", "glm": "glm45"},
    **{"kimi_k2": "kimi_k2", "minimax_m2": "minimax_m2", "gemma4": "gemma4"},
    **{"deepseek_v3": "deepseek_v3", "deepseek_v4": "deepseek_v4"},
}
"""Its parser of gpt-oss reads token ids by a vocabulary that it fetches from the web, and that of Mistral's older form
needs Mistral's own tokenizer."""
SGLANG = {
    **{"hermes": "hermes", "qwen_xml": "qwen3_coder", "llama3_json": "llama3", "mistral": "mistral"},
    **{"deepseek": "deepseekv31", "deepseek_v32": "deepseekv32", "pythonic": "pythonic", "glm": "glm45"},
    **{"kimi_k2": "kimi_k2", "minimax_m2": "minimax-m2", "gemma4": "gemma4", "gpt_oss": "gpt-oss"},
    **{"mistral_array": "mistral", "deepseek_v3": "deepseekv3", "deepseek_v4": "deepseekv4"},
}
RENDERERS = {
    **{"hermes": "qwen3", "qwen_xml": "qwen35", "llama3_json": "llama_3", "deepseek_v3": "deepseek_v3"},
    **{"glm": "glm", "deepseek_v4": "deepseek_v4", "kimi_k2": "kimi_k2", "minimax_m2": "minimax", "gpt_oss": "gpt_oss"},
}
TOKENS = {
    **{
        "think_id": "<think>",
        "think_end_id": "</think>",
        "reasoning_end_id": "</think>",
        "tool_call_id": "<tool_call>",
    },
    **{"tool_call_end_id": "</tool_call>", "arg_key_id": "<arg_key>", "arg_key_end_id": "</arg_key>"},
    **{"arg_value_id": "<arg_value>", "arg_value_end_id": "</arg_value>", "return_id": "<|return|>"},
    **{"call_id": "<|call|>", "start_id": "<|start|>", "end_id": "<|end|>", "channel_id": "<|channel|>"},
    **{"message_id": "<|message|>", "constrain_id": "<|constrain|>", "tool_calls_begin_id": "<｜tool▁calls▁begin｜>"},
    **{"tool_calls_end_id": "<｜tool▁calls▁end｜>", "tool_call_begin_id": "<｜tool▁call▁begin｜>"},
    **{"tool_sep_id": "<｜tool▁sep｜>", "tool_calls_section_begin_id": "<|tool_calls_section_begin|>"},
    **{"tool_calls_section_end_id": "<|tool_calls_section_end|>"},
    "think_start_id": "<think>",
    "tool_call_argument_begin_id": "<|tool_call_argument_begin|>",
}
OTHER_TOKENS = {
    "minimax_m2": {"tool_call_id": "<minimax:tool_call>", "tool_call_end_id": "</minimax:tool_call>"},
    "kimi_k2": {"tool_call_begin_id": "<|tool_call_begin|>", "tool_call_end_id": "<|tool_call_end|>"},
    "deepseek_v3": {"tool_call_end_id": "<｜tool▁call▁end｜>"},
}
MORE_TOKENS = (
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>"),
    *("<channel|>", "<|im_start|>", "<|im_end|>", "<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
    *(
        "｜DSML｜",
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
    ),
)
STOP = "<|endoftext|>"


def tokenizer():
    """A tokenizer of bytes, in which the markers of all formats are tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    others = [token for tokens in OTHER_TOKENS.values() for token in tokens.values()]
    marks = dict.fromkeys((*TOKENS.values(), *others, *MORE_TOKENS))
    base.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token=STOP)


TOKENIZER = tokenizer()


def by_vllm(name, text, tools):
    messages = [{"role": "user", "content": "x"}]
    request = ChatCompletionRequest(model="m", messages=messages, tools=tools)
    parser = ToolParserManager.get_tool_parser(VLLM[name])(TOKENIZER, request.tools)
    done = parser.extract_tool_calls(text, request)
    return [[call.function.name, read(call.function.arguments)] for call in done.tool_calls]


def by_sglang(name, text, tools):
    parser = FunctionCallParser([Tool(**tool) for tool in tools], SGLANG[name])
    _, calls = parser.parse_non_stream(text)
    return [[call.name, read(call.parameters)] for call in calls]


def by_renderers(name, text, tools):
    parse = getattr(parsing, f"parse_{RENDERERS[name]}")
    tokens = TOKENS | OTHER_TOKENS.get(name, {})
    takes = inspect.signature(parse).parameters
    options = {each: TOKENIZER.convert_tokens_to_ids(tokens[each]) for each in takes if each in tokens}
    options |= {"stop_ids": {TOKENIZER.convert_tokens_to_ids(STOP)}} if "stop_ids" in takes else {}
    options |= {"thinking_enabled": False} if name == "deepseek_v4" else {}
    options |= {"tools": tools} if "tools" in takes else {}
    done = parse(TOKENIZER, TOKENIZER.encode(text, add_special_tokens=False), **options)
    ok = ToolCallParseStatus.OK
    return [[call.name or "", read(call.arguments) if call.status == ok else None] for call in done.tool_calls]


def read(arguments):
    """Return the arguments as an object; null if they are not one."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def main():
    packages = {"vllm": (VLLM, by_vllm), "sglang": (SGLANG, by_sglang), "renderers": (RENDERERS, by_renderers)}
    for line in sys.stdin:
        case = json.loads(line)
        result = {}
        for package, (formats, parse) in packages.items():
            if case["format"] in formats:
                try:
                    result[package] = parse(case["format"], case["text"], case["tools"])
                except Exception as error:
                    result[package] = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
