"""Tool calls and reasoning out of sampled text, in the formats of the field: what the policy and the gateway import."""

from workers.policy.parsing.formats import FORMATS, Parser, detect, opens_reasoning, parser
from workers.policy.parsing.messages import deltas, message
from workers.policy.parsing.splitter import Parsed, Splitter

__all__ = ["FORMATS", "Parsed", "Parser", "Splitter", "deltas", "detect", "message", "opens_reasoning", "parser"]
