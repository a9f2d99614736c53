"""The options of rollouts in the installed trainers: `installed_options.py FARM_URL FOLDER`.

FOLDER has the sources of the trainers that are on no package index; missing ones are omitted.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import typing_extensions
import verl  # type: ignore[import-not-found, unused-ignore]
from absent_modules import leave_out  # type: ignore[import-not-found]

# SkyRL's records are checked by pydantic, which accepts no other before Python 3.12
typing.TypedDict = typing_extensions.TypedDict

from omegaconf import DictConfig, OmegaConf  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from skyrl.train.config import GeneratorConfig  # noqa: E402
from trl import GRPOConfig  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOConfig  # noqa: E402

OF_SLIME = re.compile(r"rollout|eval|sampl|prompt|chat_template|_key$|generate|rm_|_rm$|reward|filter|multimodal")
OF_OPENRLHF = re.compile(
    r"^(rollout|eval|data|reward|vllm)\.|dynamic_filtering|^train\.(agent|async|partial)|full_determinism"
)
"""Options of rollouts and their rewards, by their names; the others are of the model and its training."""


def of_trl(config: Any) -> list[str]:
    """Return the fields that this class of TRL's declares itself, without those of `TrainingArguments`."""
    return sorted(vars(config)["__annotations__"])


def of_verl() -> list[str]:
    """Return the keys of the configuration of its rollouts, and those of its loops of several turns."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/rollout/rollout.yaml")
    turns = [f"multi_turn.{name}" for name in config.multi_turn]
    return sorted([*(name for name in config if name != "multi_turn"), *turns])


class _ParserIsMadeError(Exception):
    """Ends a command line where its arguments would be read."""


def of_openrlhf() -> list[str]:
    """Return the options of rollouts of its command, which builds its parser when it is run."""
    import openrlhf  # type: ignore[import-not-found, unused-ignore]

    parsers: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *words: object, **named: object) -> None:
        parsers.append(parser)
        raise _ParserIsMadeError

    parse_args, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, stop  # type: ignore[assignment, method-assign]
    try:
        runpy.run_path(str(Path(openrlhf.__file__).parent / "cli/train_ppo_ray.py"), run_name="__main__")
    except _ParserIsMadeError:
        pass
    finally:
        argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]
    return sorted(action.dest for action in parsers[0]._actions if OF_OPENRLHF.search(action.dest))


def of_slime(source: Path) -> dict[str, list[str]]:
    """Return the options of rollouts and rewards of its parser, and the fields of a data set of evaluations."""
    sys.path.insert(0, str(source))
    from slime.utils.arguments import (  # type: ignore[import-not-found, unused-ignore]
        get_slime_extra_args_provider,
    )
    from slime.utils.eval_config import EvalDatasetConfig  # type: ignore[import-not-found, unused-ignore]

    parser = argparse.ArgumentParser(add_help=False)
    get_slime_extra_args_provider()(parser)
    options = {action.dest for action in parser._actions}
    return {
        "slime.arguments": sorted(name for name in options if OF_SLIME.search(name)),
        "slime.EvalDatasetConfig": sorted(each.name for each in fields(EvalDatasetConfig)),
    }


def of_rllm(source: Path) -> list[str]:
    """Return the keys of its configuration that belong to no backend, two levels deep."""
    config = OmegaConf.load(source / "rllm/trainer/config/rllm/base.yaml")
    names = []
    for name in config:
        inner = OmegaConf.to_container(config, resolve=False)[name]
        names += [f"{name}.{each}" for each in inner] if isinstance(inner, dict) else [name]
    assert isinstance(config, DictConfig)
    return sorted(names)


def of_prime_rl(source: Path) -> dict[str, list[str]]:
    """Return the fields of its orchestrator, of its environments, and of its sampling."""
    sys.path.insert(0, str(source / "packages/prime-rl-configs/src"))
    from prime_rl.configs import orchestrator  # type: ignore[import-not-found, unused-ignore]

    names = ("TrainSamplingConfig", "EvalSamplingConfig", "TrainSourceConfig", "EvalSourceConfig", "OrchestratorConfig")
    return {f"prime_rl.{name}": sorted(getattr(orchestrator, name).model_fields) for name in names}


def main() -> None:
    """Print the options of each trainer that is installed."""
    folder = Path(sys.argv[2])
    options = {
        "trl.GRPOConfig": of_trl(GRPOConfig),
        "trl.AsyncGRPOConfig": of_trl(AsyncGRPOConfig),
        "skyrl.GeneratorConfig": sorted(each.name for each in fields(GeneratorConfig)),
        "verl.rollout": of_verl(),
    }
    if (folder / "rllm/rllm").exists():
        options["rllm.base"] = of_rllm(folder / "rllm")
    if (folder / "prime-rl/packages").exists():
        options |= of_prime_rl(folder / "prime-rl")
    leave_out("sglang", "sglang_router", "megatron", "wandb", "vllm", "deepspeed", "flash_attn")
    options["openrlhf.train_ppo_ray"] = of_openrlhf()
    if (folder / "slime/slime").exists():
        options |= of_slime(folder / "slime")
    print(json.dumps(options))


main()
