"""Parses tool calls and reasoning in sampled text, in the common formats, for the policy and the gateway."""

from workers.policy.tool_calls.formats import FORMATS, Parser, detect, opens_reasoning, parser
from workers.policy.tool_calls.splitter import Parsed, Splitter, deltas, message

__all__ = ["FORMATS", "Parsed", "Parser", "Splitter", "deltas", "detect", "message", "opens_reasoning", "parser"]
