"""Another worker of a node: `python -m workers.conformance.other_worker DO PROVIDER SANDBOX_ID SPEC MARK`."""

from __future__ import annotations

import asyncio
import ctypes
import pkgutil
import platform
import sys

from farm.records.request import SandboxSpec
from workers.conformance.trial import program
from workers.plugins.interfaces import SandboxProvider

_ADD_KEY, _REQUEST_KEY, _KEYCTL = 0, 1, 2
_CALLS = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}
_JOIN, _SEARCH, _SESSION = 1, 10, -3


async def attach(provider: SandboxProvider, sandbox_id: str, spec: SandboxSpec, mark: str) -> None:
    """Use a sandbox that another process has started, print its contents, and stop it."""
    sandbox = await provider.attach(sandbox_id, spec)
    result = await sandbox.exec(["bash", "-c", "cat file; echo $X"], timeout_s=20)
    sys.stdout.write(result.stdout.decode())
    await sandbox.stop()


async def start(provider: SandboxProvider, sandbox_id: str, spec: SandboxSpec, mark: str) -> None:
    """Start a sandbox, keep a command, a shell and a kernel busy in it, and report that."""
    sandbox = await provider.start(sandbox_id, spec)
    await sandbox.exec(["bash", "-c", f"sleep {mark} >/dev/null 2>&1 &"], timeout_s=20)
    shell, kernel = await sandbox.open_shell(), await sandbox.open_kernel()
    print("up", flush=True)
    await asyncio.gather(shell.run("sleep 1000", 1000), kernel.run("import time; time.sleep(1000)", 1000))


async def keys(provider: SandboxProvider, sandbox_id: str, spec: SandboxSpec, mark: str) -> None:
    """Put a key into a new session, and print what a program in a new sandbox finds of it."""
    libc, name = ctypes.CDLL(None), f"promise-{mark}"
    calls = _CALLS[platform.machine()]
    libc.syscall(calls[_KEYCTL], _JOIN, name.encode())
    if libc.syscall(calls[_ADD_KEY], b"user", name.encode(), b"secret", 6, _SESSION) < 0:
        print("no keys")
        return
    sandbox = await provider.start(sandbox_id, spec)
    numbers = (str(calls[_KEYCTL]), str(_SEARCH), str(calls[_REQUEST_KEY]))
    result = await sandbox.exec(["python3", "-c", program("find_key"), name, *numbers], timeout_s=20)
    await sandbox.stop()
    sys.stdout.write((result.stdout + result.stderr).decode())


_DO = {work.__name__: work for work in (attach, start, keys)}

if __name__ == "__main__":
    what, kind, *words, mark = sys.argv[1:]
    spec = SandboxSpec.model_validate_json(words[1])
    asyncio.run(_DO[what](pkgutil.resolve_name(kind)(), words[0], spec, mark))
