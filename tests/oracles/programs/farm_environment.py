"""An environment of Harbor whose sandbox is one of the farm's, behind `tests/oracles/sandbox_bridge.py`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition

BRIDGE = "FARM_ORACLE_BRIDGE"
"""The variable with the bridge's command, a JSON list, and its working folder."""


class FarmEnvironment(BaseEnvironment):
    _process: asyncio.subprocess.Process | None = None

    @staticmethod
    def type() -> str:
        return "farm"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(fractional_cpus=True)

    def _validate_definition(self) -> None:
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)

    async def _ask(self, do: str, **how: Any) -> Any:
        if self._process is None:
            raise RuntimeError(f"{do}: the sandbox is not there")
        self._process.stdin.write(json.dumps({"do": do, **how}).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the bridge has ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    async def start(self, force_build: bool) -> None:
        name = self.task_env_config.docker_image
        image = f"docker://{name}" if name else f"dockerfile:{self.environment_dir}"
        command, folder = json.loads(os.environ[BRIDGE])
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=folder, limit=2**26)
        await self._ask("start", image=image, workdir=self.task_env_config.workdir or "", env=self._startup_env())
        mounts = [mount["target"] for mount in self._mounts]
        await self.ensure_dirs(mounts)

    async def stop(self, delete: bool) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.stdin.close()
            await process.wait()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._ask("upload", source=str(source_path), target=target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._ask("upload", source=str(source_dir), target=target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._ask("download", source=source_path, target=str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._ask("download", source=source_dir, target=str(target_dir))

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        who = self._resolve_user(user)
        done = await self._ask(
            "exec",
            command=command,
            user="" if who in (None, "root", 0) else str(who),
            env=self._merge_env(env) or {},
            cwd=cwd,
            timeout_s=timeout_sec or 3600,
        )
        stdout, stderr = (base64.b64decode(text).decode("utf-8", "replace") for text in done["output"])
        return ExecResult(stdout=stdout, stderr=stderr, return_code=done["code"])
