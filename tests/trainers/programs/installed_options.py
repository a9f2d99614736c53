"""The options of rollouts that the installed trainers have: `installed_options.py FARM_URL`."""

from __future__ import annotations

import json
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import typing_extensions
import verl  # type: ignore[import-not-found, unused-ignore]

# SkyRL's records are checked by pydantic, which before Python 3.12 takes no other
typing.TypedDict = typing_extensions.TypedDict

from omegaconf import OmegaConf  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from skyrl.train.config import GeneratorConfig  # noqa: E402
from trl import GRPOConfig  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOConfig  # noqa: E402


def of_trl(config: Any) -> list[str]:
    """Return the fields that this class of TRL's declares itself, and so not those of `TrainingArguments`."""
    return sorted(vars(config)["__annotations__"])


def of_verl() -> list[str]:
    """Return the keys of the configuration of its rollouts, and those of its loops of several turns."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/rollout/rollout.yaml")
    turns = [f"multi_turn.{name}" for name in config.multi_turn]
    return sorted([*(name for name in config if name != "multi_turn"), *turns])


print(
    json.dumps(
        {
            "trl.GRPOConfig": of_trl(GRPOConfig),
            "trl.AsyncGRPOConfig": of_trl(AsyncGRPOConfig),
            "skyrl.GeneratorConfig": sorted(each.name for each in fields(GeneratorConfig)),
            "verl.rollout": of_verl(),
        }
    )
)
