"""The tokenizer and chat template of an engine's model, and the tool-call format that the template shows."""

from __future__ import annotations

import asyncio
import logging

from farm.records.engine import EngineInfo
from workers.policy import tool_calls
from workers.policy.generation import EngineAddress
from workers.policy.tokens import tokenizer
from workers.policy.tokens.template import TemplateError
from workers.policy.tokens.tokenizer import ModelText, TokenizerMissing

log = logging.getLogger(__name__)


async def model_text_of(address: EngineAddress, info: EngineInfo) -> ModelText | None:
    """Return the tokenizer and template of the engine's model; None if its files are not available here."""
    for name in dict.fromkeys((address.tokenizer, info.root, address.model, info.model)):
        if name:
            try:
                return await asyncio.to_thread(tokenizer.load, name)
            except (TokenizerMissing, TemplateError) as missing:
                log.debug("Engine %s: %s", address.url, missing)
    return None


async def tool_format_of(address: EngineAddress, info: EngineInfo) -> str:
    """Return the format for parsing calls in the engine's text; empty if the engine parses them itself, or it is
    unknown here."""
    if not info.token_in:
        return ""
    if address.tool_format:
        return address.tool_format
    text = await model_text_of(address, info)
    return tool_calls.detect(text.template.source) if text is not None else ""
