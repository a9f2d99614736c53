"""The pools of a farm on Slurm: nodes of one size each, the limits of their number, and where these are stored."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from farm.configuration.config_file import ConfigFile, path_in_use
from farm.errors import InvalidRequest, NotFound
from farm.home import write_own

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
            run = max(1, min(run, math.floor(_megabytes(self.mem) / _RUN_MB)))
        return self.init_slots or max(1, self.cpus // 2), self.run_slots or run, self.eval_slots or self.cpus

    @property
    def room(self) -> int:
        """Number of rollouts that a node holds in all."""
        return sum(self.slots)


Pools = dict[str, SlurmPool]
_pools = TypeAdapter(Pools)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")


def _megabytes(text: str) -> float:
    return float(text.rstrip("KMGT")) * _UNITS.get(text[-1], 1)


def checked(tables: object, place: str) -> Pools:
    """Return validated pools. Raises InvalidRequest that names each fault."""
    try:
        result = _pools.validate_python(tables)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise InvalidRequest.of([(".".join([place, *map(str, each["loc"])]), each["msg"]) for each in faults]) from None
    for name in result:
        if not _NAME.fullmatch(name):
            raise InvalidRequest("a pool's name may have letters, digits and _", field=f"{place}.{name}")
    return result


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
    store_pools(folder, pools | {name: _without(before[name]) for name in before if name not in pools})


def keeps_head(folder: Path) -> bool:
    """Return whether the head of a folder is a job, too."""
    try:
        return stored_pools(folder)[HEAD].max > 0
    except (NotFound, KeyError):
        return False


def _without(pool: SlurmPool) -> SlurmPool:
    return pool.model_copy(update={"min": 0, "max": 0})
