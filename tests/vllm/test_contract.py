"""Every promise of an engine client, on a real vLLM: the same ones as for the scripted engine in tests/contract."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from tests.contract.engine_promises import PROMISES, Promise, check_promise
from tests.vllm.server import RealVllm


@pytest.mark.parametrize("wire", ["generate", "completions"])
@pytest.mark.parametrize("check", PROMISES, ids=lambda check: check.__name__)
def test_promise(check: Promise, wire: str, vllm: RealVllm, tokenizer: Tokenizer) -> None:
    # vLLM 0.32 reports the weight versions in one of its wire formats only.
    check_promise(vllm.url, check, tokenizer, spans=wire == "generate", token_in=wire)
