"""mini-swe-agent's loop in a sandbox that is borrowed from a farm, through its own environment for SWE-ReX.

pip install mini-swe-agent swe-rex aiohttp
farm api --host 0.0.0.0 --port 8600 --speak swe-rex

export FARM_API_KEY=KEY PYTHONPATH=examples/swe_rex
mini -c mini.yaml -c environment.environment_class=mini_swe_environment.MiniSweEnvironment \
  -c environment.url=http://HOST:8600 -c environment.spec.image=docker://python:3.11 -t "Fix the failing test."
"""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import Any

from farm_deployment import FarmDeployment
from minisweagent.environments.extra.swerex_docker import SwerexDockerEnvironment
from pydantic import BaseModel, Field
from swerex.runtime.abstract import Command

_SYSTEM = ("system", "release", "version", "machine")
"""The variables of templates that mini-swe-agent fills from `uname -s`, `-r`, `-v` and `-m`."""


class MiniSweConfig(BaseModel):
    """A sandbox of the API at `url`. The key is read from FARM_API_KEY, so that no saved trajectory contains it."""

    url: str
    spec: dict[str, Any] = Field(default_factory=dict)
    name: str = ""
    """If a sandbox of this name is open, it is reused."""
    lease_s: float = 1800.0
    cwd: str = "/workspace"
    timeout: int = 30


class MiniSweEnvironment(SwerexDockerEnvironment):  # type: ignore[misc]
    """Runs commands in a sandbox of the farm, which ends with `stop` or with this object."""

    def __init__(self, **values: Any) -> None:
        self.config = MiniSweConfig(**values)
        self.deployment = FarmDeployment(
            self.config.url,
            os.environ["FARM_API_KEY"],
            self.config.spec,
            name=self.config.name,
            lease_s=self.config.lease_s,
        )
        asyncio.run(self.deployment.start())
        self._end = weakref.finalize(self, _stop, self.deployment)
        self._system = dict(zip(_SYSTEM, asyncio.run(_system(self.deployment)), strict=True))

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        variables: dict[str, Any] = super().get_template_vars(**self._system, **more)
        return variables

    def stop(self) -> None:
        """End the sandbox. Idempotent."""
        self._end()


async def _system(deployment: FarmDeployment) -> list[str]:
    script = "for flag in s r v m; do uname -$flag; done"
    response = await deployment.runtime.execute(Command(command=script, shell=True, check=True))
    lines: list[str] = response.stdout.splitlines()
    return lines


def _stop(deployment: FarmDeployment) -> None:
    asyncio.run(deployment.stop())
