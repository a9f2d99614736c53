"""Promises about reading and writing single files, as handlers and edit tools do."""

from __future__ import annotations

import asyncio
import contextlib
import os

from farm.errors import ToolError
from workers.conformance.trial import PromiseTrial, promise, raises, same, within

_QUICK_S = 10.0
_NAMES = ("plain", "with space", 'it\'s "quoted"', "-rf", "new\nline", "*", "$HOME", "é", os.fsdecode(b"\xff\xfe"))


@promise(surface=True)
async def written_data_is_read_back(trial: PromiseTrial) -> None:
    """A written file is read back byte by byte, whatever its contents and name."""
    data = os.urandom(200_000) + b"\0\r\n"
    for name in _NAMES:
        path = f"f{trial.mark}/{name}"
        await trial.sandbox.write_file(path, data)
        assert await trial.sandbox.read_file(path) == data, f"{path!r} holds something else"
    await trial.sandbox.write_file(f"f{trial.mark}/empty", b"")
    same(await trial.sandbox.read_file(f"f{trial.mark}/empty"), b"", "what an empty file holds")


@promise(surface=True)
async def files_are_replaced_atomically(trial: PromiseTrial) -> None:
    """Writing a file again replaces all of its contents."""
    for data in (b"long " * 100, b"short"):
        await trial.sandbox.write_file(f"f{trial.mark}", data)
    same(await trial.sandbox.read_file(f"f{trial.mark}"), b"short", "what the file holds")


@promise(surface=True)
async def parent_folders_are_created(trial: PromiseTrial) -> None:
    """Writing a file creates its missing parent folders."""
    path = f"f{trial.mark}/a/b/c/file"
    await trial.sandbox.write_file(path, b"x")
    same(await trial.sandbox.read_file(path), b"x", "what the file holds")


@promise(surface=True)
async def a_missing_file_is_a_tool_error(trial: PromiseTrial) -> None:
    """Reading a file that does not exist raises ToolError with the path, worded for a model."""
    for path in (f"/none-{trial.mark}", f"none-{trial.mark}/file"):
        with raises(ToolError, path):
            await trial.sandbox.read_file(path)


@promise(surface=True)
async def reading_a_folder_is_a_tool_error(trial: PromiseTrial) -> None:
    """Reading or writing a folder as a file raises ToolError, and so does a path through a file."""
    folder = f"f{trial.mark}"
    await trial.sandbox.write_file(f"{folder}/file", b"x")
    with raises(ToolError, folder):
        await trial.sandbox.read_file(folder)
    for path in (folder, f"{folder}/file/below"):
        with raises(ToolError):
            await trial.sandbox.write_file(path, b"y")
    same(await trial.sandbox.read_file(f"{folder}/file"), b"x", "what the file beside them holds")


@promise(surface=True)
async def invalid_path_is_a_tool_error(trial: PromiseTrial) -> None:
    """An empty path, one with a NUL, and one with a name that is too long raise ToolError."""
    for path in ("", "a\0b", "x" * 300, "x/" * 3000):
        with raises(ToolError):
            await trial.sandbox.read_file(path)
        with raises(ToolError):
            await trial.sandbox.write_file(path, b"")


@promise(surface=True)
async def commands_see_written_files(trial: PromiseTrial) -> None:
    """Files and commands use the same file system: a relative path starts in the working folder for both."""
    name = f"f{trial.mark}"
    await trial.sandbox.write_file(name, b"written\n")
    same(await trial.sh(f"cat {name}; echo told > {name}"), "written\n", "what a command reads")
    same(await trial.sandbox.read_file(name), b"told\n", "what a command wrote")
    path = (await trial.sh("pwd")).strip()
    same(await trial.sandbox.read_file(f"{path}/{name}"), b"told\n", "what the absolute path holds")


@promise(surface=True)
async def writing_keeps_mode_and_links(trial: PromiseTrial) -> None:
    """Writing an existing file keeps its mode, its hard links, and the link that led to it."""
    name = f"f{trial.mark}"
    await trial.sh(f"echo old > {name}; chmod 750 {name}; ln {name} {name}-hard; ln -s {name} {name}-soft")
    await trial.sandbox.write_file(f"{name}-soft", b"new")
    same(await trial.sh(f"stat -c %a {name}; cat {name}-hard; test -L {name}-soft"), "750\nnew", "mode and contents")


@promise()
async def written_files_belong_to_the_policy(trial: PromiseTrial) -> None:
    """A written file belongs to the user that commands run as, who may change, run and delete it."""
    name = f"f{trial.mark}/script"
    await trial.sandbox.write_file(name, b"#!/bin/bash\necho ran\n")
    owners = (await trial.sh(f"touch own; stat -c %u:%g own {name} f{trial.mark}")).split()
    assert len(set(owners)) == 1, f"the owner of a file made inside, of the written one and its folder differ: {owners}"
    same(await trial.sh(f"chmod +x {name}; ./{name}; rm -r f{trial.mark}"), "ran\n", "what the script prints")


@promise()
async def refused_write_is_a_tool_error(trial: PromiseTrial) -> None:
    """Writing where the kernel refuses raises ToolError with the kernel's reason."""
    with raises(ToolError, "/proc/version"):
        await trial.sandbox.write_file("/proc/version", b"x")
    with raises(ToolError):
        await trial.sandbox.write_file(f"/proc/new-{trial.mark}", b"x")


@promise()
async def a_named_pipe_does_not_hang(trial: PromiseTrial) -> None:
    """Reading or writing a named pipe whose other end is not open raises ToolError immediately."""
    path = f"f{trial.mark}"
    await trial.sh(f"mkfifo {path}")
    async with within(_QUICK_S):
        with raises(ToolError):
            await trial.sandbox.read_file(path)
        with raises(ToolError):
            await trial.sandbox.write_file(path, b"x")


@promise()
async def reading_a_device_is_a_tool_error(trial: PromiseTrial) -> None:
    """Reading or writing a device, even an endless one or through a link, raises ToolError immediately."""
    await trial.sh(f"ln -s /dev/zero f{trial.mark}")
    async with within(_QUICK_S):
        for path in ("/dev/zero", f"f{trial.mark}", "/dev/stdin", "/dev/tty", "/dev/ptmx"):
            with raises(ToolError):
                await trial.sandbox.read_file(path)
        with raises(ToolError):
            await trial.sandbox.write_file("/dev/null", b"x")


@promise("python3")
async def reading_a_socket_is_a_tool_error(trial: PromiseTrial) -> None:
    """Reading or writing a Unix socket raises ToolError."""
    path = f"f{trial.mark}"
    code = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
    await trial.python(code, path)
    with raises(ToolError):
        await trial.sandbox.read_file(path)
    with raises(ToolError):
        await trial.sandbox.write_file(path, b"x")


@promise()
async def a_huge_file_is_refused(trial: PromiseTrial) -> None:
    """Reading a file too large for memory raises ToolError immediately."""
    path = f"f{trial.mark}"
    await trial.sh(f"truncate -s 2G {path} || truncate -s 1G {path}")
    async with within(_QUICK_S):
        with raises(ToolError, path):
            await trial.sandbox.read_file(path)
    await trial.sh(f"rm {path}")


@promise()
async def reading_a_growing_file_ends(trial: PromiseTrial) -> None:
    """Reading a file that is written to without end comes to an end."""
    path = f"f{trial.mark}"
    pid = (await trial.sh(f"while :; do echo more; done > {path} & echo $!")).strip()
    async with within(_QUICK_S):
        for _ in range(10):
            # it may have become too large meanwhile
            with contextlib.suppress(ToolError):
                await trial.sandbox.read_file(path)
    await trial.sh(f"kill -9 {pid}; rm {path}")


@promise(surface=True)
async def files_are_read_concurrently(trial: PromiseTrial) -> None:
    """Many files can be written and read at the same time."""
    paths = [f"f{trial.mark}/{n}" for n in range(40)]
    await asyncio.gather(*(trial.sandbox.write_file(path, path.encode() * 1000) for path in paths))
    contents = await asyncio.gather(*(trial.sandbox.read_file(path) for path in paths))
    for path, data in zip(paths, contents, strict=True):
        assert data == path.encode() * 1000, f"{path} holds what was not written to it"
