"""A whole farm on a real vLLM that loses its weights: a trainer is killed inside an update, or the server is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from farm.records.engine import PauseMode
from tests.services.farms import embedded, farm_folder, until
from tests.vllm.server import RealVllm, prepared, started
from tests.vllm.test_farm import N, running, scored
from tests.vllm.test_reload import load

_QUIET_S = 3.0
_N_TOKENS = 1_900
_N_PROBED = 16
"""More tokens than the farm samples to probe an engine."""
_KILLED = """
import os, signal, sys
from pathlib import Path
import farm
from tests.vllm.server import RealVllm
from tests.vllm.test_reload import load
store, broker, version, mode, url, *weights = sys.argv[1:]
with farm.connect(store, broker_url=broker) as client:
    print("ready", flush=True)
    sys.stdin.readline()
    with client.weight_update(version, mode=mode):
        load(RealVllm(url, Path(), tuple(map(Path, weights))), 1)
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""Starts once it reads a line."""


class RestartBench:
    """A farm whose only engine is its own server, which can be killed and started again with its first weights."""

    def __init__(self, vllm: RealVllm, here: Embedded, client: farm.Farm, folder: Path) -> None:
        self.vllm = vllm
        self.here = here
        self.client = client
        self._folder = folder
        self._server = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = self._server.enter_context(started(self.vllm, self._folder / "server.log"))

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        self._server.close()

    def submit(self) -> str:
        """Submit N rollouts of one long answer each."""
        question = {"data_source": "chat", "fields": {"question": "What do you make of it?"}}
        length = {"min_tokens": _N_TOKENS, "max_tokens": _N_TOKENS}
        limits = {"max_turns": 1, "run_s": 600}
        request = {"instances": [question], "n_samples": N, "sampling": length, "limits": limits}
        return self.client.submit(request)

    def sampling(self) -> str:
        """Submit them, and return once all of them sample."""
        batch_id = self.submit()
        until(lambda: running(self.vllm) == N, "all rollouts sample")
        return batch_id

    @property
    def status(self) -> str:
        return self.client.engines()[0].engine.status

    def sampled(self) -> float:
        return self.vllm.metric("vllm:generation_tokens_total")

    def versions(self, batch_id: str) -> set[int]:
        """Return the versions of a batch's tokens: no rollout was lost, and the newest version's tokens score right."""
        rollouts = self.client.collect(batch_id, timeout_s=300)
        assert [(rollout.trainable, rollout.attempt) for rollout in rollouts] == [(True, 1)] * N
        newest = int(self.client.newest_version())
        rows = [row for rollout in rollouts for row in rollout.segments]
        assert len(rows) == N
        for row in rows:
            new = row.policy_versions == newest
            assert np.allclose(scored(self.vllm, row)[new], row.response_logprobs[new], atol=1e-3)
        return {int(version) for row in rows for version in row.policy_versions}


@pytest.fixture(scope="module")
def bench(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartBench]:
    folder = tmp_path_factory.mktemp("lost-weights")
    vllm = prepared(vllm_python, folder)
    with (
        farm_folder() as place,
        embedded(place, FARM_POLICY_URL=f"{vllm.url}/v1") as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as client,
    ):
        result = RestartBench(vllm, here, client, folder)
        result.start()
        try:
            until(lambda: client.engines()[0].engine.info is not None, "the engine was asked what it can do", 300)
            yield result
        finally:
            result.stop()


@pytest.mark.parametrize("mode", ["drain", "keep", "abort"])
def test_engines_of_a_killed_trainer_sample_nothing_until_the_next_update(bench: RestartBench, mode: PauseMode) -> None:
    client, vllm = bench.client, bench.vllm
    first = int(client.newest_version() or 0) + 1
    load(vllm, 0)
    client.set_version(first)
    words = (bench.here.store_url, bench.here.broker_url, str(first + 1), mode, vllm.url, *map(str, vllm.weights))
    command = [sys.executable, "-c", _KILLED, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        under_way = bench.sampling()
        trainer.communicate(b"\n", timeout=60)
    assert trainer.returncode == -signal.SIGKILL
    held = bench.submit()
    n_sampled = bench.sampled()
    until(lambda: bench.status == "abandoned", "the trainer is missed")
    assert bench.sampled() == n_sampled
    assert any("push them again" in warning for warning in client.status(held).warnings)
    with client.weight_update(first + 2, mode=mode):
        load(vllm, 1)
    # the weights that the killed trainer had pushed were never named
    assert bench.versions(under_way) == ({first} if mode == "drain" else {first, first + 2})
    assert bench.versions(held) == {first + 2}
    assert bench.status == "ready"


@pytest.mark.parametrize("how", ["pushed again", "loaded from where they lie"])
def test_server_that_restarts_without_the_weights_gets_no_calls_until_it_has_them(
    bench: RestartBench, how: str
) -> None:
    client, vllm = bench.client, bench.vllm
    version = int(client.newest_version() or 0) + 1
    with client.weight_update(version, mode="keep", path=vllm.weights[1] if how.startswith("loaded") else ""):
        load(vllm, 1)
    batch_id = bench.sampling()
    bench.kill()
    until(lambda: bench.status == "out", "the server is missed")
    bench.start()
    if how == "pushed again":
        until(lambda: bench.status == "without weights", "the server is found to lack them", 300)
        time.sleep(_QUIET_S)
        assert bench.sampled() < _N_PROBED
        assert any(f"lacks version {version}" in warning for warning in client.status(batch_id).warnings)
        with client.weight_update(version, mode="keep"):
            load(vllm, 1)
    assert bench.versions(batch_id) == {version}
