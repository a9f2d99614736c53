"""The scripted engine as a program and in a test, and how it identifies itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from tokenizers import Tokenizer

from workers.testing.engine import ScriptedEngine
from workers.testing.scripted_model import Branch, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

SCRIPT = ScriptedProblem(match="two", branches=(Branch(name="four", turns=(ScriptedTurn(content="It is 4."),)),))
GENERATE = "/inference/v1/generate"


@contextmanager
def program(*words: str) -> Iterator[httpx2.Client]:
    command = [sys.executable, "-m", "workers.testing.engine", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            with httpx2.Client(base_url=process.stdout.readline().strip()) as client:
                yield client
        finally:
            process.terminate()


def test_engine_serves_a_script(tmp_path: Path) -> None:
    script = tmp_path / "book.jsonl"
    script.write_text(f"{SCRIPT.model_dump_json()}\n")
    with program("--book", str(script), "--weight-version", "5", "--model-text", str(tmp_path / "model")) as client:
        root = Path(client.get("/v1/models").json()["data"][0]["root"])
        tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
        prompt = tokenizer.encode("<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n").ids
        (choice,) = client.post(GENERATE, json={"token_ids": prompt, "sampling_params": {}}).json()["choices"]
        assert client.get("/weight_info").json() == {"weight_version": "5"}
    assert tokenizer.decode(choice["token_ids"]) == "It is 4."
    assert root == tmp_path / "model"


def test_engine_serves_random_answers() -> None:
    with program("--random") as client:
        root = Path(client.get("/v1/models").json()["data"][0]["root"])
        body = {"token_ids": [5, 9], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
        assert len(client.post(GENERATE, json=body).json()["choices"][0]["token_ids"]) == 3
    assert not root.exists()


def test_engine_identifies_itself_as_a_double_and_refuses_unsupported_requests() -> None:
    with serving(ScriptedEngine().app()) as url, httpx2.Client(base_url=url) as client:
        assert "test-double" in client.get("/v1/models").json()["data"][0]["owned_by"]
        refused = client.post(GENERATE, json={"token_ids": [5], "sampling_params": {}, "output_mode": "text"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "output_mode")
        assert client.post("/v1/chat/completions", json={"messages": []}).status_code == 404


def test_own_model_folder_is_removed_at_the_end() -> None:
    engine = ScriptedEngine()
    root = engine.root
    assert (root / "tokenizer.json").exists()
    del engine
    assert not root.exists()


def test_program_prints_the_address_and_the_command_that_adds_it() -> None:
    words = [sys.executable, "-m", "workers.testing.engine", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        url = program.stdout.readline().strip()
        assert program.stderr.readline() == f"farm engines add {url}/v1\n"
        program.terminate()
    assert url.startswith("http://127.0.0.1:")
