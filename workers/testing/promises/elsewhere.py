"""Another process of the node that uses the same provider, as another worker does."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from workers.testing.promises.trial import Trial

_BEGIN = """
import asyncio, pkgutil, sys
from farm.request import SandboxSpec
provider = pkgutil.resolve_name(sys.argv[1])()
sandbox_id, spec = sys.argv[2], SandboxSpec.model_validate_json(sys.argv[3])
"""
ATTACH = """
async def main():
    sandbox = await provider.attach(sandbox_id, spec)
    result = await sandbox.exec(["bash", "-c", "cat file; echo $X"], timeout_s=20)
    sys.stdout.write(result.stdout.decode())
    await sandbox.stop()
asyncio.run(main())
"""
START = """
async def main():
    sandbox = await provider.start(sandbox_id, spec)
    await sandbox.exec(["bash", "-c", f"sleep {sys.argv[4]} >/dev/null 2>&1 &"], timeout_s=20)
    shell, kernel = await sandbox.open_shell(), await sandbox.open_kernel()
    print("up", flush=True)
    await asyncio.gather(shell.run("sleep 1000", 1000), kernel.run("import time; time.sleep(1000)", 1000))
asyncio.run(main())
"""
KEYS = """
import ctypes, platform
ADD_KEY, REQUEST_KEY, KEYCTL = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[platform.machine()]
JOIN, SEARCH, SESSION = 1, 10, -3
FIND = f'''
import ctypes, sys
libc, name = ctypes.CDLL(None), sys.argv[1].encode()
try:
    listed = open("/proc/keys").read()
except OSError:
    listed = ""
print("found:", *["by search"] * (libc.syscall({KEYCTL}, {SEARCH}, {SESSION}, b"user", name, 0) >= 0),
      *["by request"] * (libc.syscall({REQUEST_KEY}, b"user", name, 0, 0) >= 0),
      *["in /proc/keys"] * (sys.argv[1] in listed))
'''
async def main():
    libc, name = ctypes.CDLL(None), f"promise-{sys.argv[4]}"
    libc.syscall(KEYCTL, JOIN, name.encode())
    if libc.syscall(ADD_KEY, b"user", name.encode(), b"secret", 6, SESSION) < 0:
        return print("no keys")
    sandbox = await provider.start(sandbox_id, spec)
    result = await sandbox.exec(["python3", "-c", FIND, name], timeout_s=20)
    await sandbox.stop()
    sys.stdout.write((result.stdout + result.stderr).decode())
asyncio.run(main())
"""


@asynccontextmanager
async def elsewhere(trial: Trial, code: str, sandbox_id: str, **fields: object) -> AsyncIterator[Process]:
    """Runs `code`, which finds `provider`, `sandbox_id` and `spec`, until it ends or the block does."""
    kind = type(trial.provider)
    words = [f"{kind.__module__}:{kind.__qualname__}", sandbox_id, trial.spec(**fields).model_dump_json(), trial.mark]
    # a plug-in may be on the path of this process only
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _BEGIN + code, *words, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
