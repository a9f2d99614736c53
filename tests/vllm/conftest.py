"""A real vLLM for the tests in this folder: `make test-vllm`. Without FARM_VLLM_PYTHON none of them is collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.vllm.server import RealVllm, real_vllm
from workers.testing.engine.model_text import make_tokenizer

if not os.environ.get("FARM_VLLM_PYTHON"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python that has vLLM; its packages are not ours."""
    return Path(os.environ["FARM_VLLM_PYTHON"])


@pytest.fixture(scope="session")
def vllm(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVllm]:
    """A running vLLM with a tiny random-weight model, and a second set of weights for it."""
    with real_vllm(vllm_python, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()
