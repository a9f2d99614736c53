"""The scripts of a farm's Slurm jobs, from the template `job_script.sh.j2`; users can print and edit them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from farm.configuration.config_file import pinned
from farm.configuration.secret_values import has_credentials
from farm.launch.slurm_pool import HEAD, SlurmPool
from farm.settings import Settings

SIGNAL_S = 60
"""Seconds before its time limit at which Slurm signals a node to end; it may be a minute more."""
_CLEAN_UP_S = 15
"""Part of the time between SIGTERM and SIGKILL that a node needs to release its rollouts and clean up."""
_GRACE_S = 15
_TEMPLATE = Path(__file__).with_name("job_script.sh.j2")
_OWN = {"FARM_HOME", "FARM_NODE"}
_OF_HEAD = {"FARM_STORE_URL", "FARM_BROKER_URL", "FARM_API_KEY", "FARM_SECRET_KEY"}
"""Settings that a node reads from its head."""
_PASSED = ("PATH", "PYTHONPATH", "LANG", "HOME", "SLURM_CONF")


def job_name(farm_id: str, pool: str) -> str:
    """Return the name of a pool's jobs."""
    return f"farm-{farm_id}-{pool}"


def job_script(folder: Path, farm_id: str, name: str, pool: SlurmPool, kill_wait_s: int) -> str:
    """Return the script of a pool's jobs, with the present PATH and FARM_* settings."""
    from jinja2 import Environment, StrictUndefined

    template = Environment(  # noqa: S701 - not HTML, so no escaping
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    ).from_string(_TEMPLATE.read_text())
    farm = [sys.executable, "-m", "farm.cli.main"]
    init, run, score = pool.slots
    grace_s = max(0, min(_GRACE_S, kill_wait_s - _CLEAN_UP_S))
    words = [*farm, "node", "--at", str(folder), "--init", init, "--run", run, "--eval", score, "--grace", grace_s]
    if name == HEAD:
        words = [*farm, "head", "--dir", str(folder), "--standby"]
    return template.render(
        what="The head" if name == HEAD else f"Nodes, pool {name},",
        folder=folder,
        name=job_name(farm_id, name),
        pool=pool,
        signal_s=SIGNAL_S,
        logs=folder / "logs",
        keys=shlex.quote(str(keys_path(folder, name))),
        env={variable: shlex.quote(value) for variable, value in _environment().items()},
        command=shlex.join(map(str, words)),
    )


def passed_settings() -> dict[str, str]:
    """Return the FARM_* variables of this process that its remote nodes get, too."""
    own = {name: value for name, value in os.environ.items() if name.startswith("FARM_")}
    return pinned() | {name: value for name, value in own.items() if name not in _OWN | _OF_HEAD}


def job_keys(name: str) -> str:
    """Return the secret settings of a pool's jobs as lines of shell; the script has the others."""
    passed = passed_settings() | {variable: os.environ[variable] for variable in _OF_HEAD if variable in os.environ}
    kept = {variable for variable in passed if _is_secret(variable, passed[variable])}
    kept -= set() if name == HEAD else _OF_HEAD
    return "".join(f"export {variable}={shlex.quote(passed[variable])}\n" for variable in sorted(kept))


def keys_path(folder: Path, pool: str) -> Path:
    """Return the path of the keys of a pool's jobs, private to their owner."""
    return folder / "slurm" / f"{pool}.keys"


def _environment() -> dict[str, str]:
    passed = {name: value for name, value in passed_settings().items() if not _is_secret(name, value)}
    return {name: os.environ[name] for name in _PASSED if name in os.environ} | passed


def _is_secret(variable: str, value: str) -> bool:
    field = Settings.model_fields.get(variable.removeprefix("FARM_").lower())
    return variable in _OF_HEAD or (field is not None and not field.repr) or has_credentials(value)


def script_path(folder: Path, pool: str) -> Path:
    """Return the path of a pool's script."""
    return folder / "slurm" / f"{pool}.sh"
