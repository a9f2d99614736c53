"""Promises about `upload` and `download`: whole files and folders between the node and a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from farm.errors import ToolError
from farm.records.request import SandboxLimits
from workers.conformance.trial import PromiseTrial, promise, raises, same, within

_QUICK_S = 15.0
_MANY = 500


def tree(folder: Path) -> dict[str, object]:
    """Return a folder as a mapping from names to contents: mode and bytes, a link's target, None for a folder."""
    entries: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            entries[name] = f"-> {path.readlink()}"
        elif path.is_file():
            # permissions of other users may differ on each side
            entries[name] = (oct(path.stat().st_mode & 0o700), path.read_bytes())
        else:
            entries[name] = None if path.is_dir() else "neither file nor folder"
    return entries


def made_tree(folder: Path) -> Path:
    """Create a folder with everything that may be copied: data, modes, empty folders, odd names, links within it."""
    (folder / "sub/deep").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "data").write_bytes(os.urandom(300_000))
    (folder / "sub/script").write_text("#!/bin/sh\necho ran\n")
    (folder / "sub/script").chmod(0o755)
    (folder / "sub/deep/it's\n*").write_text("odd")
    (folder / "sub/deep/up").symlink_to("../script")
    (folder / "sub/here").symlink_to("deep")
    (folder / "nothing").touch()
    return folder


@promise(surface=True)
async def files_are_uploaded_and_downloaded(trial: PromiseTrial) -> None:
    """A file of the node is uploaded to a path, and downloaded again, byte by byte."""
    source, target = trial.folder / "source", trial.folder / "target"
    source.write_bytes(os.urandom(5_000_000))
    await trial.sandbox.upload(source, f"t{trial.mark}")
    assert await trial.sandbox.read_file(f"t{trial.mark}") == source.read_bytes(), "another file arrived inside"
    await trial.sandbox.download(f"t{trial.mark}", target)
    assert target.read_bytes() == source.read_bytes(), "another file came back"


@promise(surface=True)
async def folders_are_uploaded_and_downloaded(trial: PromiseTrial) -> None:
    """A folder is uploaded and downloaded completely: data, modes, empty folders, odd names, links within it."""
    source, target = made_tree(trial.folder / "source"), trial.folder / "target"
    await trial.sandbox.upload(source, f"t{trial.mark}")
    same(await trial.sandbox.read_file(f"t{trial.mark}/sub/deep/it's\n*"), b"odd", "a file of the uploaded folder")
    await trial.sandbox.download(f"t{trial.mark}", target)
    same(tree(target), tree(source), "the folder that came back")


@promise(surface=True)
async def uploaded_files_are_usable(trial: PromiseTrial) -> None:
    """Uploaded files belong to the user that commands run as, who may run, change and delete them."""
    name = f"t{trial.mark}"
    await trial.sandbox.upload(made_tree(trial.folder / "source"), name)
    same(await trial.sh(f"cd {name}; ./sub/script; echo more >> data"), "ran\n", "what the uploaded script prints")
    owners = (await trial.sh(f"touch own; stat -c %u:%g own {name} {name}/data {name}/sub/deep/up")).split()
    assert len(set(owners)) == 1, f"the owner of a file made inside, and of three uploaded ones, differ: {owners}"
    await trial.sh(f"rm -r {name}")


@promise(surface=True)
async def an_upload_replaces_a_file(trial: PromiseTrial) -> None:
    """Uploading a file over another replaces all of it."""
    source = trial.folder / "source"
    for data in (b"long " * 1000, b"short"):
        source.write_bytes(data)
        await trial.sandbox.upload(source, f"t{trial.mark}")
    same(await trial.sandbox.read_file(f"t{trial.mark}"), b"short", "what the file holds")


@promise(surface=True)
async def uploading_a_missing_path_is_a_tool_error(trial: PromiseTrial) -> None:
    """Uploading a missing file of the node raises ToolError, and nothing is created inside."""
    with raises(ToolError):
        await trial.sandbox.upload(trial.folder / "none", f"t{trial.mark}")
    with raises(ToolError):
        await trial.sandbox.read_file(f"t{trial.mark}")


@promise(surface=True)
async def download_never_overwrites(trial: PromiseTrial) -> None:
    """Downloading to a target that exists raises ToolError and does not change it."""
    await trial.sandbox.write_file(f"t{trial.mark}", b"theirs")
    target = trial.folder / "target"
    target.write_bytes(b"ours")
    with raises(ToolError, str(target)):
        await trial.sandbox.download(f"t{trial.mark}", target)
    same(target.read_bytes(), b"ours", "what the target holds")
    link = trial.folder / "link"
    link.symlink_to(trial.folder / "elsewhere")
    with raises(ToolError):
        await trial.sandbox.download(f"t{trial.mark}", link)
    assert not (trial.folder / "elsewhere").exists(), "the download followed a link of the node"


@promise(surface=True)
async def downloading_a_missing_path_is_a_tool_error(trial: PromiseTrial) -> None:
    """Downloading a missing file raises ToolError with the path, and leaves no target."""
    with raises(ToolError, f"t{trial.mark}"):
        await trial.sandbox.download(f"t{trial.mark}", trial.folder / "target")
    assert not (trial.folder / "target").exists(), "there is a target all the same"


@promise()
async def links_to_the_outside_are_not_copied(trial: PromiseTrial) -> None:
    """No link in a downloaded folder leads out of it, however it is written or chained."""
    secret = trial.folder / "secret"
    secret.write_text("of the host")
    name = f"t{trial.mark}"
    script = f"""
        mkdir -p {name}/sub/deep; cd {name}; echo fine > file; ln -s ../file sub/within; ln -s {secret} absolute
        ln -s ../../../../../../../../..{secret} up; ln -s .. above; ln -s above/../../.. chained; ln -s / root
        ln -s sub/../../.. sub/around; ln -s "$PWD/file" inside; ln -s loop loop; ln -s /etc/passwd passwd
    """
    await trial.sh(script)
    target = trial.folder / "target"
    await trial.sandbox.download(name, target)
    for path in target.rglob("*"):
        if path.is_symlink():
            within = Path(os.path.realpath(path)).is_relative_to(target) and not path.readlink().is_absolute()
            assert within, f"{path.name} leads to {path.readlink()}, out of the folder that was downloaded"
        elif path.is_file():
            same(path.read_text(), "fine\n", f"what {path.name} holds")
    same((target / "sub/within").read_text(), "fine\n", "what the link within the folder leads to")


@promise()
async def links_are_followed_in_downloads(trial: PromiseTrial) -> None:
    """Downloading a link returns its target inside, never the node's file at that path."""
    secret = trial.folder / "secret"
    secret.write_text("of the host")
    name = f"t{trial.mark}"
    await trial.sh(f"echo fine > {name}; ln -s {name} {name}-in; ln -s {secret} {name}-out; ln -s / {name}-root")
    await trial.sandbox.download(f"{name}-in", trial.folder / "in")
    same((trial.folder / "in").read_text(), "fine\n", "what the link leads to")
    for path in (f"{name}-out", f"{name}-root{secret}", str(secret), f"../../../../../..{secret}"):
        with raises(ToolError):
            await trial.sandbox.download(path, trial.folder / "out")


@promise("python3")
async def pipes_devices_and_sockets_are_left_out(trial: PromiseTrial) -> None:
    """Named pipes, devices and sockets in a downloaded folder are left out, and the download does not block on them."""
    name = f"t{trial.mark}"
    await trial.sh(f"mkdir {name}; cd {name}; mkfifo pipe; echo fine > file")
    await trial.python("import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])", f"{name}/socket")
    target = trial.folder / "target"
    async with within(_QUICK_S):
        await trial.sandbox.download(name, target)
    same([path.name for path in target.iterdir()], ["file"], "what came of the folder")
    async with within(_QUICK_S):
        for path in (f"{name}/pipe", f"{name}/socket", "/dev/zero", "/dev/tty"):
            with raises(ToolError):
                await trial.sandbox.download(path, trial.folder / "single")
    assert not (trial.folder / "single").exists(), "something was copied all the same"


@promise()
async def downloads_drop_set_uid_bits(trial: PromiseTrial) -> None:
    """A downloaded file gives no rights on the node: its set-uid and set-gid bits are removed."""
    name = f"t{trial.mark}"
    await trial.sh(f"mkdir {name}; cp /bin/true {name}/program; chmod 6755 {name}/program; chmod 2777 {name}")
    await trial.sandbox.download(name, trial.folder / "target")
    mode = (trial.folder / "target/program").stat().st_mode
    assert not mode & 0o6000, f"the mode on the node is {mode & 0o7777:o}"


@promise()
async def a_file_too_big_for_the_node_is_refused(trial: PromiseTrial) -> None:
    """Downloading a file that would fill the node's disk, or appears so large, raises ToolError and leaves nothing."""
    one = await trial.start(limits=SandboxLimits(file_mb=8_000_000))
    await trial.sh("mkdir folder; truncate -s 4T folder/huge", one)
    async with within(_QUICK_S):
        for path in ("folder", "folder/huge"):
            with raises(ToolError):
                await one.download(path, trial.folder / "target")
            assert not (trial.folder / "target").exists(), "a part of it was left on the node"


@promise()
async def uploads_do_not_follow_links_of_the_node(trial: PromiseTrial) -> None:
    """A link in an uploaded folder is not followed to files outside of that folder."""
    (trial.folder / "secret").write_text("of the host")
    source = trial.folder / "source"
    source.mkdir()
    (source / "link").symlink_to(trial.folder / "secret")
    (source / "file").write_text("fine")
    await trial.sandbox.upload(source, f"t{trial.mark}")
    same(await trial.sh(f"cd t{trial.mark}; cat file; cat link 2>/dev/null || true"), "fine", "what can be read inside")


@promise()
async def uploads_stay_inside(trial: PromiseTrial) -> None:
    """An upload follows links inside like a command there, and changes nothing on the node."""
    victim = trial.folder / "victim"
    victim.mkdir()
    source = trial.folder / "source"
    source.write_text("uploaded")
    name = f"t{trial.mark}"
    await trial.sh(f"ln -s {victim} {name}; ln -s {victim}/file {name}-file")
    for path in (f"{name}/file", f"{name}-file", f"../../../../../..{victim}/file"):
        with contextlib.suppress(ToolError):
            await trial.sandbox.upload(source, path)
    assert not list(victim.iterdir()), "a folder of the node was written to"
    await trial.sandbox.upload(source, f"{victim}/inside")
    same(await trial.sh(f"cat {victim}/inside"), "uploaded", "what lies at the same path inside")
    assert not list(victim.iterdir()), "a folder of the node was written to"


@promise(surface=True)
async def many_small_files_are_copied_at_once(trial: PromiseTrial) -> None:
    """A folder of many files, or a deep one, is uploaded and downloaded completely."""
    source = trial.folder / "source"
    for n in range(_MANY):
        path = source / str(n % 50) / str(n)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(n))
    deep = source.joinpath(*["d"] * 100)
    deep.mkdir(parents=True)
    (deep / "bottom").write_text("reached")
    await trial.sandbox.upload(source, f"t{trial.mark}")
    await trial.sandbox.download(f"t{trial.mark}", trial.folder / "target")
    same(tree(trial.folder / "target") == tree(source), True, "whether the folder that came back is the same")


@promise()
async def deep_trees_are_copied(trial: PromiseTrial) -> None:
    """A folder deeper than any path can name is copied or refused with ToolError, without a crash or hang."""
    name = f"t{trial.mark}"
    part = f"{'d' * 60}/" * 50
    deep = f"mkdir {name}; cd {name}; for i in 1 2 3; do mkdir -p {part}; cd {part}; done"
    await trial.sh(deep)
    async with within(_QUICK_S):
        with contextlib.suppress(ToolError):
            await trial.sandbox.download(name, trial.folder / "target")
    await trial.sh(f"rm -r {name}")


@promise()
async def uploading_to_a_pipe_is_a_tool_error(trial: PromiseTrial) -> None:
    """Uploading to a pipe or socket, or into a folder with one of that name, raises ToolError immediately."""
    source = trial.folder / "source"
    source.mkdir()
    (source / "file").write_text("x")
    name = f"t{trial.mark}"
    await trial.sh(f"mkdir {name}; mkfifo {name}/file {name}-pipe; (sleep 60 <>{name}-pipe) >/dev/null 2>&1 &")
    async with within(_QUICK_S):
        for what, path in ((source / "file", f"{name}/file"), (source, name), (source / "file", f"{name}-pipe")):
            with raises(ToolError):
                await trial.sandbox.upload(what, path)


@promise()
async def a_cancelled_copy_ends_at_once(trial: PromiseTrial) -> None:
    """Cancelling an upload or a download takes effect within seconds, however large the copy is."""
    name = f"t{trial.mark}"
    await trial.sh(f"mkdir {name}; cd {name}; truncate -s 1G large; for i in {{1..500}}; do : >$i; done")
    source = trial.folder / "source"
    with source.open("wb") as file:
        file.truncate(1 << 30)
    for work in (
        trial.sandbox.download(name, trial.folder / "target"),
        trial.sandbox.upload(source, f"{name}/in"),
    ):
        copying = asyncio.ensure_future(work)
        await asyncio.sleep(0.1)
        async with within(_QUICK_S):
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
    await trial.sh(f"rm -rf {name}")


@promise()
async def hard_links_are_kept(trial: PromiseTrial) -> None:
    """Hard links to one file stay hard links to one file in a download."""
    name = f"t{trial.mark}"
    await trial.sh(f"mkdir -p {name}/a; cd {name}; echo x >a/one; ln a/one two; chmod 700 two")
    await trial.sandbox.download(name, trial.folder / "target")
    one, two = (trial.folder / "target" / path for path in ("a/one", "two"))
    same((two.read_text(), one.samefile(two)), ("x\n", True), "text, and whether they are one file")
