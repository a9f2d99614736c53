"""A sandbox of the farm for a program in another environment: requests and answers are lines of JSON.

`python -m tests.oracles.sandbox_bridge` serves one sandbox of the kind `namespace`, and stops it when its input ends.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from farm.errors import FarmError
from farm.records.request import SandboxSpec
from workers.plugins.interfaces import Sandbox
from workers.plugins.registry import sandbox as provider

_KIND = "namespace"


class _OneSandbox:
    """One sandbox, in which commands of several users run."""

    def __init__(self) -> None:
        self._id = f"oracle-{uuid4().hex[:12]}.0.0"
        self._spec = SandboxSpec()
        self._by_user: dict[str, Sandbox] = {}

    async def _of(self, user: str) -> Sandbox:
        if user not in self._by_user:
            spec = self._spec.model_copy(update={"user": user})
            self._by_user[user] = await provider(_KIND).attach(self._id, spec)
        return self._by_user[user]

    async def start(self, image: str, workdir: str, env: dict[str, str]) -> None:
        self._spec = SandboxSpec(image=image, image_first=True, fake_root=True, workdir=workdir, env=env)
        self._by_user[""] = await provider(_KIND).start(self._id, self._spec)

    async def exec(self, command: str, user: str, env: dict[str, str], cwd: str | None, timeout_s: float) -> Any:
        sandbox = await self._of(user)
        done = await sandbox.exec(["/bin/bash", "-c", command], timeout_s=timeout_s, env=env, cwd=cwd)
        texts = [base64.b64encode(data).decode() for data in (done.stdout, done.stderr)]
        return {"code": 124 if done.code is None else done.code, "output": texts}

    async def upload(self, source: str, target: str) -> None:
        """Copy a file, or the contents of a folder, into the sandbox; other files there are kept."""
        sandbox = await self._of("")
        for path, inside in await asyncio.to_thread(_places, Path(source), target):
            await sandbox.exec(["mkdir", "-p", inside if path is None else str(Path(inside).parent)], timeout_s=60.0)
            if path is not None:
                await sandbox.upload(path, inside)

    async def download(self, source: str, target: str) -> None:
        sandbox = await self._of("")
        with TemporaryDirectory(prefix="farm-oracle-") as place:
            await sandbox.download(source, Path(place) / "copy")
            await asyncio.to_thread(_put, Path(place) / "copy", target)

    async def stop(self) -> None:
        if "" in self._by_user:
            await self._by_user.pop("").stop()


def _places(source: Path, target: str) -> list[tuple[Path | None, str]]:
    """Return the files of a tree with their paths inside, and its folders, which have no path on the node."""
    if not source.is_dir():
        return [(source, target)]
    inner = [(path, f"{target}/{path.relative_to(source)}") for path in sorted(source.rglob("*"))]
    return [(None, target), *((None if path.is_dir() else path, inside) for path, inside in inner)]


def _put(copy: Path, target: str) -> None:
    if copy.is_dir():
        shutil.copytree(copy, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy(copy, target)


async def serve() -> None:
    """Answer each line of the standard input with one line."""
    bridge = _OneSandbox()
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            try:
                answer = {"value": await getattr(bridge, request.pop("do"))(**request)}
            except (FarmError, OSError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        await bridge.stop()


if __name__ == "__main__":
    asyncio.run(serve())
