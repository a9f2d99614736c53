"""The requests that prime-rl's own configuration sends to the farm's env server.

`prime_rl_sampling.py FARM_URL PRIME_RL`, where PRIME_RL is the folder of its source. Its configuration is that of its
example `configs/basic/reverse-text/rl.toml`, whose taskset is an empty one here; its `Env` makes the request.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found, unused-ignore]
from absent_modules import leave_out  # type: ignore[import-not-found]
from verifiers.v1.configs.client import TrainClientConfig  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.serve.types import RunRequest  # type: ignore[import-not-found, unused-ignore]

from farm.adapters.verifiers.env_server import run_of, sampling_of
from farm.errors import InvalidRequest
from farm.records.request import SamplingParams

SOURCE = Path(sys.argv[2])
sys.path[:0] = [str(SOURCE / "packages/prime-rl-configs/src"), str(SOURCE / "src")]
leave_out("wandb", "torchtitan", "vllm", "prime_evals")


class ReverseText(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):  # type: ignore[misc, unused-ignore]
    """A taskset with the example's name."""


def request_of(sampling: Any) -> RunRequest:
    endpoint = TrainClientConfig(base_url="http://127.0.0.1:1/v1")
    return RunRequest(client=endpoint, model="m", sampling=sampling, task_data={})


def farm_sampling(sampling: Any) -> dict[str, Any] | str:
    """Return the sampling parameters of a batch, or the name of the one that is refused."""
    try:
        fields = sampling_of(run_of(request_of(sampling).model_dump(mode="json")))["sampling"]
    except InvalidRequest as error:
        return error.field
    return SamplingParams(**fields).model_dump(exclude_unset=True, mode="json")


def main() -> None:
    """Print the parameters of a training rollout, of an evaluation, and the refused fields."""
    module = ModuleType("reverse_text")
    module.ReverseText, module.__all__ = ReverseText, ["ReverseText"]  # type: ignore[attr-defined]
    sys.modules["reverse_text"] = module
    from prime_rl.configs.orchestrator import (  # type: ignore[import-not-found, unused-ignore]
        EvalSamplingConfig,
        OrchestratorConfig,
        TrainSamplingConfig,
    )
    from prime_rl.orchestrator.envs import Env  # type: ignore[import-not-found, unused-ignore]

    written = tomllib.loads((SOURCE / "configs/basic/reverse-text/rl.toml").read_text())["orchestrator"]
    (source,) = OrchestratorConfig.model_validate(written).train.source

    def made(config: Any, salt: str | None) -> Any:
        env = Env.__new__(Env)
        env.sampling_args = config.to_sampling_args()
        return env._sampling(salt)

    every = {"temperature": 0.5, "top_p": 0.9, "top_k": 9, "min_p": 0.1, "max_completion_tokens": 7}
    facts = {
        "train": farm_sampling(made(source.sampling, "3")),
        "default": farm_sampling(made(TrainSamplingConfig(), None)),
        "evaluation": farm_sampling(made(EvalSamplingConfig(), None)),
        "set": farm_sampling(made(EvalSamplingConfig(**every, extra_body={"repetition_penalty": 1.1}), None)),
        "refused": [
            farm_sampling(made(EvalSamplingConfig(reasoning_effort="low"), None)),
            farm_sampling(made(TrainSamplingConfig(extra_body={"logit_bias": {"5": 1.0}}), None)),
        ],
    }
    print(json.dumps(facts))


main()
