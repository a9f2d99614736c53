"""The text of an episode's turns, as `examples/training/chat_template.jinja` formats messages."""

from __future__ import annotations

CONTEXT_TOKENS = 512
"""The policy's context: the longest episode has a quarter of it."""
TURN_BEGIN = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL = '<tool_call>{"name": "bash", "arguments": {"command": "cat '
CALL_END = '"}}</tool_call>'


def opening(request: str) -> str:
    """Return the first prompt, up to the beginning of the policy's turn."""
    return f"{TURN_BEGIN}user\n{request}{TURN_END}\n{TURN_BEGIN}assistant\n"


def observation(output: str) -> str:
    """Return the text after a turn: a tool's output, up to the beginning of the policy's next turn."""
    response = f"<tool_response>{output}</tool_response>"
    return f"\n{TURN_BEGIN}user\n{response}{TURN_END}\n{TURN_BEGIN}assistant\n"
