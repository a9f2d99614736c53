"""Starts a real vLLM on the CPU with our own model; its output goes to `server.log` next to its environment."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.training.vllm_server import START_S, VARIABLES, answers, free_port, vllm_command
from testkit.private_server import running
from workers.testing.engine.model_text import write_model_text

CONTEXT_TOKENS = 2048
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class RealVllm:
    """`url` without /v1. `weights` are two folders with one model's files; the server began with the first."""

    url: str
    python: Path
    weights: tuple[Path, Path]

    def post(self, path: str, body: Any = None) -> Any:
        """Call the server directly, without the code under test."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def metric(self, name: str) -> float:
        return metric(self.url, name)


def metric(url: str, name: str) -> float:
    """Return the sum of a server's metric over all its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def in_vllm(python: Path, script: str, *words: object, stdin: str = "") -> str:
    """Run a script of this folder in vLLM's Python and return its output."""
    command = [str(python), str(_HERE / script), *map(str, words)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def prepared(python: Path, folder: Path) -> RealVllm:
    """Make the model's files in the folder, and choose a server's address; it is not started yet."""
    weights = (folder / "one", folder / "two")
    for each in weights:
        write_model_text(each)
    in_vllm(python, "make_weights.py", CONTEXT_TOKENS, *weights)
    return RealVllm(f"http://127.0.0.1:{free_port()}", python, weights)


@contextmanager
def started(server: RealVllm, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server at its address, with its first weights, until the block ends or it is killed."""
    variables = (f"{name}={value}" for name, value in VARIABLES.items())
    port = int(server.url.rpartition(":")[2])
    command = ("env", *variables, *vllm_command(server.python, server.weights[0], port, CONTEXT_TOKENS))
    with running(command, lambda: answers(f"{server.url}/health"), log, start_s=START_S) as process:
        yield process


@contextmanager
def real_vllm(python: Path, folder: Path) -> Iterator[RealVllm]:
    """Make the model's files in the folder, start the server, and stop it at the end of the block."""
    server = prepared(python, folder)
    with started(server, python.parents[2] / "server.log"):
        yield server


def _environment() -> dict[str, str]:
    return {**os.environ, **VARIABLES}
