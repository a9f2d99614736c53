"""A real vLLM on the CPU, as a child of this process: its command, its environment, and waiting until it answers."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from farm.embedded.child_process import ChildProcess
from farm.errors import ServiceError

T = TypeVar("T")

VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # threads that wait for each other at each layer stall where other processes share the cores
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Its environment: control endpoints for weight updates, no telemetry, no network, threads that share the machine."""
START_S = 400.0
"""The longest silence of its log while it starts: on an idle machine it starts in half a minute, else in minutes."""
_STOP_S = 20.0
_GROUP = Path(__file__).with_name("process_group.sh")
_POLL_S = 0.1


def vllm_command(python: Path, model: Path, port: int, context_tokens: int) -> Sequence[str]:
    """Return the command of a server whose model is called `tiny`, with all options that the farm uses."""
    return (
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(context_tokens), "--max-num-seqs", "64", "--enable-scale-out"),
        # a prompt with a seed that is prefilled in chunks ends vLLM 0.32 on a CPU: "CPU Generator does not use offset"
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(8 * context_tokens)),
        *("--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    )


@contextmanager
def vllm_server(python: Path, model: Path, context_tokens: int, log: Path) -> Iterator[str]:
    """Run a server until the block ends; yields its URL without /v1. Raises ServiceError with the end of its log."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log.unlink(missing_ok=True)
    command = ["bash", str(_GROUP), *vllm_command(python, model, port, context_tokens)]
    child = ChildProcess(command, log=log, env=os.environ | VARIABLES, on_parent_death=signal.SIGTERM)
    try:
        await_answer(child, log, lambda: answers(f"{url}/health"), START_S)
        yield url
    finally:
        child.terminate()
        child.end(_STOP_S)


def await_answer(child: ChildProcess, log: Path, answer: Callable[[], T | None], within_s: float) -> T:
    """Return the answer of a starting child.

    Raises ServiceError if it ends before, or if neither an answer nor a line in its log comes for so long.
    """
    deadline, n_logged = time.monotonic() + within_s, 0
    while not (value := answer()):
        if (n := log.stat().st_size if log.exists() else 0) > n_logged:
            deadline, n_logged = time.monotonic() + within_s, n
        if not child.running or time.monotonic() > deadline:
            raise ServiceError(f"{log.stem} did not start; {log} ends with:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(_POLL_S)
    return value


def answers(url: str) -> bool:
    """Return whether a server answers there."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
