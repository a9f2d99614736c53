"""The pools of a farm on Slurm: nodes of one size each, the limits of their number, where these are stored, and
the scripts of their jobs, from the template `job_script.sh.j2`; users can print and edit them.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from farm.configuration.config_file import ConfigFile, path_in_use, pinned
from farm.configuration.secret_values import has_credentials
from farm.errors import InvalidRequest, NotFound
from farm.home import write_own
from farm.settings import Settings

HEAD = "head"
"""The pool of the job that is the farm's head."""
_FILE = "slurm.json"
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
_RUN_MB = 256
"""Memory per running rollout, for nodes that have little memory per CPU."""
Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f]*$", max_length=255)]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=1000)]


class SlurmPool(BaseModel):
    """Single-node jobs of one size; at least `min` at a time, and up to `max` while rollouts wait."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    partition: Word = ""
    account: Word = ""
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] = "4:00:00"
    """The time limit of a job in Slurm's format."""
    cpus: int = Field(default=4, ge=1)
    mem: Annotated[str, Field(pattern=r"^(\d+[KMGT]?)?$")] = ""
    """Memory of a job; empty: the partition's default."""
    min: int = Field(default=1, ge=0)
    max: int = Field(default=1, ge=0, le=10_000)
    setup: str = ""
    """Lines of shell before the node is started, such as `module load apptainer`."""
    sbatch: tuple[Line, ...] = ()
    """Additional options of sbatch, such as `--constraint=ssd`."""
    init_slots: int | None = Field(default=None, ge=1)
    run_slots: int | None = Field(default=None, ge=1)
    eval_slots: int | None = Field(default=None, ge=1)
    """Rollouts that a node starts, runs and scores at a time; by default from its CPUs and memory."""

    @model_validator(mode="after")
    def _in_order(self) -> SlurmPool:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, less than min, {self.min}")
        return self

    @property
    def slots(self) -> tuple[int, int, int]:
        """Numbers of rollouts that a node starts, runs and scores at a time."""
        run = 8 * self.cpus
        if self.mem:
            megabytes = float(self.mem.rstrip("KMGT")) * _UNITS.get(self.mem[-1], 1)
            run = max(1, min(run, math.floor(megabytes / _RUN_MB)))
        return self.init_slots or max(1, self.cpus // 2), self.run_slots or run, self.eval_slots or self.cpus

    @property
    def room(self) -> int:
        """Number of rollouts that a node holds in all."""
        return sum(self.slots)


Pools = dict[str, SlurmPool]
_pools = TypeAdapter(Pools)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")


def checked(tables: object, path: str) -> Pools:
    """Return validated pools. Raises InvalidRequest that names each fault."""
    try:
        pools = _pools.validate_python(tables)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise InvalidRequest.of([(".".join([path, *map(str, each["loc"])]), each["msg"]) for each in faults]) from None
    for name in pools:
        if not _NAME.fullmatch(name):
            raise InvalidRequest("a pool's name may have letters, digits and _", field=f"{path}.{name}")
    return pools


def pools_of_file() -> Pools:
    """Return the pools of farm.toml, its tables `[slurm.NAME]`; none without them. Raises InvalidRequest."""
    path = path_in_use()
    tables = {} if path is None else ConfigFile(path).values.get("slurm", {})
    return checked(tables, "slurm")


def stored_pools(folder: Path) -> Pools:
    """Return the stored pools of a farm's jobs. Raises NotFound if it has none."""
    try:
        return _pools.validate_json((folder / _FILE).read_bytes())
    except FileNotFoundError:
        raise NotFound(f"no farm of {folder} runs on Slurm: `farm slurm up --dir {folder}`") from None


def store_pools(folder: Path, pools: Pools) -> None:
    """Store the pools that the farm's head maintains."""
    write_own(folder / _FILE, _pools.dump_json(pools, indent=1, exclude_defaults=True).decode())


def replace_pools(folder: Path, pools: Pools) -> None:
    """Make the head maintain these pools, and no jobs of earlier ones that are left out."""
    try:
        before = stored_pools(folder)
    except NotFound:
        before = {}
    left_out = {name: pool for name, pool in before.items() if name not in pools}
    emptied = {name: pool.model_copy(update={"min": 0, "max": 0}) for name, pool in left_out.items()}
    store_pools(folder, pools | emptied)


def keeps_head(folder: Path) -> bool:
    """Return whether the head of a folder is a job, too."""
    try:
        return stored_pools(folder)[HEAD].max > 0
    except (NotFound, KeyError):
        return False


SIGNAL_S = 60
"""Seconds before its time limit at which Slurm signals a node to end; it may be a minute more."""
_CLEAN_UP_S = 15
"""Part of the time between SIGTERM and SIGKILL that a node needs to release its rollouts and clean up."""
_GRACE_S = 15
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
    ).from_string(Path(__file__).with_name("job_script.sh.j2").read_text())
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
    return pinned() | {name: value for name, value in own.items() if name not in {"FARM_HOME", "FARM_NODE"} | _OF_HEAD}


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
