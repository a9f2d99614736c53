"""The double as a program, and how it identifies itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from tokenizers import Tokenizer

from tests.doubles import EngineDouble
from tests.doubles.vllm.sampling import FINGERPRINT
from workers.testing.scripted_model import Branch, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

SCRIPT = ScriptedProblem(match="two", branches=(Branch(name="four", turns=(ScriptedTurn(content="It is 4."),)),))


@contextmanager
def program(*words: str) -> Iterator[httpx2.Client]:
    command = [sys.executable, "-m", "tests.doubles", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            with httpx2.Client(base_url=process.stdout.readline().strip()) as client:
                yield client
        finally:
            process.terminate()


def test_program_serves_a_script(tmp_path: Path) -> None:
    script = tmp_path / "book.jsonl"
    script.write_text(f"{SCRIPT.model_dump_json()}\n")
    with program("--book", str(script), "--weight-version", "5", "--model-text", str(tmp_path / "model")) as client:
        root = Path(client.get("/v1/models").json()["data"][0]["root"])
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "two"}]}).json()
        assert client.get("/weight_info").json() == {"weight_version": "5"}
    assert answer["choices"][0]["message"]["content"] == "It is 4."
    assert answer["system_fingerprint"] == FINGERPRINT
    assert Tokenizer.from_file(str(root / "tokenizer.json")).get_vocab_size() > 256
    assert root == tmp_path / "model"


def test_program_serves_random_answers_with_faults_as_sglang() -> None:
    with program("--random", "--wire", "sglang", "--fault", "500:1") as client:
        root = Path(client.get("/model_info").json()["model_path"])
        assert (root / "tokenizer.json").exists()
        assert client.post("/generate", json={"text": "hi"}).status_code == 500
    assert not root.exists()


def test_unknown_fault_ends_the_program() -> None:
    command = [sys.executable, "-m", "tests.doubles", "--fault", "501"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 1
    assert "there is no fault '501'" in ended.stderr


@pytest.mark.parametrize("wire", ["vllm", "sglang", "openai"])
def test_double_identifies_itself_as_a_double(wire: str) -> None:
    with serving(EngineDouble(wire=wire).app()) as url, httpx2.Client(base_url=url) as client:  # type: ignore[arg-type]
        assert "test-double" in client.get("/v1/models").json()["data"][0]["owned_by"]


def test_plain_server_has_no_ids_and_no_control_endpoints() -> None:
    result = {"messages": [{"role": "user", "content": "two"}], "return_token_ids": True, "logprobs": True}
    with serving(EngineDouble(wire="openai").app()) as url, httpx2.Client(base_url=url) as client:
        (choice,) = client.post("/v1/chat/completions", json=result).json()["choices"]
        assert (choice["logprobs"], choice["token_ids"]) == (None, None)
        assert client.post("/v1/completions", json={"prompt": [5]}).status_code == 404
        assert client.post("/pause").status_code == 404
