"""Parses the words of a command for verl like its `main_ppo`: `verl_command.py FARM_URL WORD...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import verl.trainer  # type: ignore[import-not-found, unused-ignore]
from hydra import compose, initialize_config_dir  # type: ignore[import-not-found, unused-ignore]


def main() -> None:
    """Print the settings of the resulting configuration that the farm uses."""
    folder = Path(verl.trainer.__file__).parent / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", sys.argv[2:])
    print(json.dumps({"manager": config.actor_rollout_ref.rollout.agent.agent_loop_manager_class}))


main()
