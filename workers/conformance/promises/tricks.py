"""Promises about attempts to reach the node's files from inside a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from farm.errors import ToolError
from workers.conformance.trial import PromiseTrial, promise, raises, same

_RACE_S = 2.0


def secret_of(trial: PromiseTrial) -> Path:
    """Return a file of the node that every user of it can read."""
    path = trial.folder / "secret"
    path.write_text("of the host")
    path.chmod(0o644)
    return path


def victim_of(trial: PromiseTrial) -> Path:
    """Return a folder of the node that every user of it can write to."""
    path = trial.folder / "victim"
    path.mkdir()
    path.chmod(0o777)
    return path


@promise()
async def paths_do_not_lead_outside(trial: PromiseTrial) -> None:
    """Paths are those of the sandbox: a path with any number of `..`, or one of the node, names nothing outside."""
    secret = secret_of(trial)
    for path in (str(secret), f"../../../../../../../..{secret}", f"/usr/../..{secret}", f"/proc/self/cwd{secret}"):
        with raises(ToolError):
            await trial.sandbox.read_file(path)


@promise()
async def links_do_not_lead_outside(trial: PromiseTrial) -> None:
    """A link to a path of the node, at the end or in the middle of a path, is resolved inside."""
    secret, name = secret_of(trial), f"l{trial.mark}"
    await trial.sh(f"ln -s {secret} {name}; ln -s / {name}-root; ln -s ../../../../../../../.. {name}-up")
    for path in (name, f"{name}-root{secret}", f"{name}-up{secret}"):
        with raises(ToolError):
            await trial.sandbox.read_file(path)
    await trial.sandbox.write_file(f"{name}-root/tmp/{name}", b"inside")
    same(await trial.sh(f"cat /tmp/{name}"), "inside", "what was written through a link")


@promise()
async def proc_does_not_lead_outside(trial: PromiseTrial) -> None:
    """No process that reads or writes a file for the worker exposes its root, folders or descriptors of the node."""
    secret = secret_of(trial)
    for who in ("self", "1", "thread-self", "self/task/self"):
        for what in ("root", "cwd", *(f"fd/{number}" for number in range(30))):
            with contextlib.suppress(ToolError):
                content = await trial.sandbox.read_file(f"/proc/{who}/{what}{secret}")
                raise AssertionError(f"/proc/{who}/{what} leads to files of the node: {content!r}")


@promise()
async def writes_stay_inside(trial: PromiseTrial) -> None:
    """Writing through links changes nothing on the node, even where everyone may write to the node's path."""
    victim, name = victim_of(trial), f"l{trial.mark}"
    await trial.sh(f"ln -s {victim} {name}; ln -s {victim}/file {name}-file; ln -s / {name}-root")
    for path in (f"{name}/file", f"{name}-file", f"{name}-root{victim}/file", f"../../../../..{victim}/file"):
        with contextlib.suppress(ToolError):
            await trial.sandbox.write_file(path, b"x")
    assert not list(victim.iterdir()), "a folder of the node was written to"


@promise(time_s=90)
async def exchanged_links_do_not_lead_outside(trial: PromiseTrial) -> None:
    """A folder that repeatedly turns into a link while files are read and copied gains no access."""
    victim, name = victim_of(trial), f"l{trial.mark}"
    (victim / "file").write_text("of the host")
    source, n = trial.folder / "source", 0
    source.write_text("uploaded")
    async with _swapping(trial, name, victim):
        ends_at = time.monotonic() + _RACE_S
        while time.monotonic() < ends_at:
            n += 1
            await _one_round(trial, name, source, trial.folder / f"target-{n}")
    same((victim / "file").read_text(), "of the host", "the file of the node")
    same([path.name for path in victim.iterdir()], ["file"], "what lies in the folder of the node")


@asynccontextmanager
async def _swapping(trial: PromiseTrial, name: str, victim: Path) -> AsyncIterator[None]:
    """Alternate a path inside between a folder with a file and a link to a folder of the node, while the block runs."""
    script = f"""
        mkdir {name}-real; echo inside > {name}-real/file
        while :; do mv {name}-real {name}; mv {name} {name}-real; ln -s {victim} {name}; rm {name}; done 2>/dev/null
    """
    running = asyncio.create_task(trial.bash(script, timeout_s=60))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _one_round(trial: PromiseTrial, name: str, source: Path, target: Path) -> None:
    with contextlib.suppress(ToolError):
        result = await trial.sandbox.read_file(f"{name}/file")
        assert result in (b"inside\n", b"", b"uploaded", b"written"), f"a file of the node was read: {result!r}"
    for write in (
        trial.sandbox.write_file(f"{name}/new/file", b"written"),
        trial.sandbox.upload(source, f"{name}/uploaded"),
        trial.sandbox.download(name, target),
    ):
        with contextlib.suppress(ToolError):
            await write
    for path in target.rglob("*") if target.is_dir() else ():
        assert path.is_symlink() or path.is_dir() or path.read_bytes() != b"of the host", (
            "a file of the node was copied"
        )


@promise("tar")
async def archives_unpack_inside(trial: PromiseTrial) -> None:
    """An archive whose members lead out of it reaches nothing of the node when it is unpacked inside."""
    victim, name = victim_of(trial), f"l{trial.mark}"
    script = f"""
        mkdir {name}; cd {name}; echo x > file
        tar -cPf a.tar --transform 's,file,../../../../../..{victim}/climbed,' file
        ln -s {victim} link; tar -cf b.tar link; rm link; mkdir link; echo x > link/through; tar -rf b.tar link/through
        rm -r link; tar -xPf a.tar 2>/dev/null; tar -xPf b.tar 2>/dev/null; true
    """
    await trial.sh(script)
    assert not list(victim.iterdir()), "a folder of the node was written to"


@promise()
async def programs_of_the_image_are_not_trusted(trial: PromiseTrial) -> None:
    """Files are read and written correctly, whatever the sandbox did to its shell's start files and libraries."""
    one = await trial.start()
    script = """
        for file in /etc/profile /etc/bash.bashrc /root/.bashrc /root/.profile /root/.bash_profile; do
            echo 'echo fooled; exit 3' > $file
        done; echo /no/such/library.so > /etc/ld.so.preload
    """
    await one.exec(["bash", "-c", script], timeout_s=10)
    await one.write_file("file", b"honest")
    same(await one.read_file("file"), b"honest", "what the file holds")
    source = trial.folder / "source"
    source.write_text("honest")
    await one.upload(source, "uploaded")
    await one.download("uploaded", trial.folder / "target")
    same((trial.folder / "target").read_text(), "honest", "what the file that came back holds")
