"""Promises about the root file system: the image below and the sandbox's own layer above behave as one."""

from __future__ import annotations

from farm.errors import ToolError
from workers.conformance.trial import NotTried, PromiseTrial, program, promise, raises, same
from workers.plugins.interfaces import Sandbox

_LAYER_MB = 100
_FILES = 1020


async def _changeable(on: Sandbox, what: str, script: str) -> str:
    path = (await on.exec(["bash", "-c", script], timeout_s=30)).stdout.decode().strip()
    if not path:
        raise NotTried(f"the image has no {what} that may be changed")
    return path


async def image_folder(on: Sandbox) -> str:
    """Return a folder of the image that is not empty and may be changed."""
    script = """
        shopt -s nullglob; for folder in /etc/*/ /opt/*/ /usr/share/*/ /usr/lib/*/; do
            folder=${folder%/}; [[ -L $folder ]] && continue
            if [[ -n $(ls -A $folder) ]] && mv $folder $folder.probe 2>/dev/null; then
                mv $folder.probe $folder; echo $folder; break
            fi
        done
    """
    return await _changeable(on, "folder with contents", script)


async def image_file(on: Sandbox) -> str:
    """Return a file of the image that is not empty and may be changed."""
    script = "for file in /etc/*; do [[ -s $file && -f $file && ! -L $file && -w $file ]] && echo $file && break; done"
    return await _changeable(on, "file below /etc", script)


@promise()
async def image_folders_can_be_removed(trial: PromiseTrial) -> None:
    """`rm -rf` of a folder of the image removes it; if it is created again, it is empty."""
    one = await trial.start()
    # two folders, because the search for one that may be changed moves it
    folder = await image_folder(await trial.start())
    same(await trial.sh(f"rm -rf {folder}; ls -d {folder} 2>/dev/null || echo gone", one), "gone\n", "what `ls` says")
    script = f"mkdir {folder}; ls -A {folder}; echo new > {folder}/file; ls -A {folder}; cat {folder}/file"
    same(await trial.sh(script, one), "file\nnew\n", "what is in the folder that was made again")


@promise()
async def image_folders_can_be_renamed(trial: PromiseTrial) -> None:
    """`mv` of a folder of the image moves it with all its contents, and leaves nothing behind."""
    one = await trial.start()
    folder = await image_folder(await trial.start())
    before = await trial.sh(f"cd {folder}; ls -AR . | sort", one)
    same(await trial.sh(f"mv {folder} /moved; cd /moved; ls -AR . | sort", one), before, "what is in the moved folder")
    same(await trial.sh(f"ls -d {folder} 2>/dev/null || echo gone", one), "gone\n", "what is left")
    same(await trial.sh(f"mv /moved {folder}; cd {folder}; ls -AR . | sort", one), before, "what came back")


@promise()
async def image_folders_can_be_replaced(trial: PromiseTrial) -> None:
    """A folder of the image can be replaced as by pip: moved aside, created again, and the old one deleted."""
    one = await trial.start()
    folder = await image_folder(await trial.start())
    script = f"""
        set -e; mv {folder} {folder}~old; mkdir {folder}; echo new > {folder}/file; rm -r {folder}~old
        ls -A {folder}; cat {folder}/file; test ! -e {folder}~old
        mv {folder} {folder}~old; mv {folder}~old {folder}; ls -A {folder}
    """
    same(await trial.sh(script, one), "file\nnew\nfile\n", "what is in the new folder")


@promise("python3")
async def folders_can_be_exchanged(trial: PromiseTrial) -> None:
    """A rename over an empty folder, and over a file, replaces it in one step."""
    code = """
import os
os.makedirs("a/sub"); os.mkdir("b"); os.rename("a", "b"); print(os.listdir("b"), os.path.exists("a"))
open("x", "w").write("x"); open("y", "w").write("y"); os.replace("x", "y"); print(open("y").read())
"""
    same(await trial.python(code, on=await trial.start()), "['sub'] False\nx\n", "what is left after the renames")


@promise()
async def image_files_can_be_changed(trial: PromiseTrial) -> None:
    """A file of the image can be appended to, edited in place, renamed, truncated, replaced and removed."""
    one = await trial.start()
    file = await image_file(one)
    script = f"""
        set -e; echo added >> {file}; tail -n 1 {file}; sed -i s/added/edited/ {file}; tail -n 1 {file}
        mv {file} {file}.bak; test ! -e {file}; cp -p {file}.bak {file}; cmp {file} {file}.bak
        echo new > {file}.new; mv {file}.new {file}; cat {file}; : > {file}; stat -c %s {file}
        rm {file}; test ! -e {file}; ls /etc | grep -cx {file.rpartition("/")[2]} || true
    """
    same(await trial.sh(script, one), "added\nedited\nnew\n0\n0\n", "what became of the file")


@promise()
async def packages_can_be_replaced(trial: PromiseTrial) -> None:
    """A file of the image can be replaced as by dpkg: a new file, a hard link to the old one, a rename over it."""
    one = await trial.start()
    file = await image_file(one)
    script = f"""
        set -e; cp {file} copy; echo unpacked > {file}.dpkg-new; chmod 644 {file}.dpkg-new; sync {file}.dpkg-new
        ln {file} {file}.dpkg-tmp; mv -f {file}.dpkg-new {file}; cat {file}; cmp copy {file}.dpkg-tmp
        rm {file}.dpkg-tmp; ln -s {file} {file}.dpkg-link; mv -f {file}.dpkg-link {file}.link; cat {file}.link
    """
    same(await trial.sh(script, one), "unpacked\nunpacked\n", "what the file holds")


@promise("dpkg-deb", "dpkg")
async def a_package_can_be_installed(trial: PromiseTrial) -> None:
    """With `fake_root`, `dpkg` itself installs, replaces and removes a package whose files belong to several users."""
    script = """
        set -e
        for version in 1 2; do
            mkdir -p build/DEBIAN build/opt/promised/sub; echo $version > build/opt/promised/sub/file
            ln -f build/opt/promised/sub/file build/opt/promised/hard; chown -R 12:34 build/opt/promised
            printf 'Package: promised\\nVersion: %s\\nArchitecture: all\\nMaintainer: x <x@x.x>\\nDescription: x\\n' \
                $version > build/DEBIAN/control
            dpkg-deb --build build promised-$version.deb >/dev/null
        done
        mkdir -p admin/info admin/updates admin/triggers; : > admin/status; : > admin/available
        run() { dpkg --admindir=$PWD/admin --log=/dev/null "$@" >/dev/null; }
        for version in 1 2; do run -i promised-$version.deb; done
        cat /opt/promised/hard; run -r promised; test ! -e /opt/promised
    """
    result = await trial.bash(script, await trial.start(fake_root=True), 60)
    same((result.code, result.stdout), (0, b"2\n"), f"code and output of dpkg, which says {result.stderr!r},")


@promise()
async def removed_files_stay_removed(trial: PromiseTrial) -> None:
    """A removed file is not visible to any program, by name or in a listing, and its name can be used again."""
    script = """
        set -e; before=$(ls -A /etc | wc -l); rm -rf /etc/* 2>/dev/null || true; ls -A /etc | wc -l
        mkdir /etc/passwd; rmdir /etc/passwd; echo mine > /etc/passwd; ls -A /etc; cat /etc/*
        rm /etc/passwd; ls -A /etc | wc -l; test $before -gt 0
    """
    lines = (await trial.sh(script, await trial.start())).splitlines()
    bound = int(lines[0])
    same(lines[-1], str(bound), f"how many entries are left in /etc, of which {bound} cannot be removed")
    assert "mine" in lines, f"the new file is not found: {lines}"


@promise()
async def the_image_is_not_changed(trial: PromiseTrial) -> None:
    """Changes of one sandbox to the image are not visible in another of the same image, started before or after."""
    one, two = await trial.start(), await trial.start()
    script = "cd /; ls -AR etc opt srv var 2>/dev/null | sort; cat etc/* 2>/dev/null | cksum"
    before = await trial.sh(script, two)
    await trial.bash("rm -rf /etc/* /opt/* /srv /var/*; echo x > /etc/new; mkdir /srv; echo x > /srv/new", one)
    same(await trial.sh(script, two), before, "what another sandbox sees that runs")
    await one.stop()
    same(await trial.sh(script, await trial.start()), before, "what a later sandbox sees")


@promise()
async def forbidden_changes_are_reported(trial: PromiseTrial) -> None:
    """A change in the node's own system folders, which are bound read-only, fails with the kernel's error."""
    image = trial.spec().image
    if image != "host":
        raise NotTried(f"the image {image} may be changed by the sandbox")
    for script in ("echo x > /usr/bin/new", "rm -rf /usr/bin/bash", "mv /usr/bin /usr/old", "chmod 777 /usr/bin/bash"):
        result = await trial.bash(script)
        assert result.code != 0, f"`{script}` succeeded"
        assert b"Read-only file system" in result.stderr or b"busy" in result.stderr, f"it says {result.stderr!r}"
    with raises(ToolError, "Read-only file system"):
        await trial.sandbox.write_file("/usr/bin/new", b"x")


@promise()
async def changes_of_owner_succeed(trial: PromiseTrial) -> None:
    """With `fake_root` a change of owner seems to succeed, in commands and shells, as installers expect."""
    one = await trial.start(fake_root=True)
    script = "set -e; touch file; mkdir -p d/e; chown 1000:1000 file; chown -R 1:1 d; echo fine"
    same(await trial.sh(script, one), "fine\n", "what comes after the changes")
    assert (await (await trial.shell(one)).run("chown 12 file; chgrp 34 file", 10)).code == 0, "a shell cannot do it"
    await trial.sh("install -o 5 -g 6 -m 640 file installed; cp -a installed copy; test -f copy", one)


@promise("tar")
async def an_archive_with_owners_unpacks(trial: PromiseTrial) -> None:
    """An archive with files of other users unpacks completely: with `fake_root` silently, without it by an option."""
    pack = "mkdir -p p/q; echo x > p/q/f; tar -cf a.tar --owner=1234 --group=5678 p; rm -r p; "
    one = await trial.start(fake_root=True)
    same(await trial.sh(f"{pack} tar -xf a.tar; cat p/q/f", one), "x\n", "what was unpacked as fake root")
    two = await trial.start(fake_root=False)
    same(await trial.sh(f"{pack} tar -xf a.tar --no-same-owner; cat p/q/f", two), "x\n", "what was unpacked")


@promise()
async def owners_are_fixed_without_fake_root(trial: PromiseTrial) -> None:
    """Without `fake_root` a change of owner fails with a reason, and the file is not changed."""
    one = await trial.start(fake_root=False)
    result = await trial.bash("echo x > file; chown 1000:1000 file", one)
    assert result.code not in (0, None), "`chown` seems to have succeeded"
    assert b"chown" in result.stderr, f"`chown` gives no reason: {result.stderr!r}"
    same(await trial.sh("stat -c %u file; cat file", one), "0\nx\n", "owner and contents")


@promise()
async def links_are_supported(trial: PromiseTrial) -> None:
    """Hard links share their contents and are counted; symbolic links may be dangling; both can be renamed."""
    script = f"""
        set -e; mkdir l{trial.mark}; cd l{trial.mark}; echo one > a; ln a b; ln a c; stat -c %h a; echo two > b; cat c
        rm a; stat -c %h b; mv b d; cat d; ln -s nowhere s; readlink s; mv s t; readlink t; ln d e; cat e
        mkdir sub; ln d sub/d; stat -c %i d sub/d | uniq | wc -l; cp -al sub copy; cat copy/d
    """
    same(await trial.sh(script), "3\ntwo\n2\ntwo\nnowhere\nnowhere\ntwo\n1\ntwo\n", "what the links lead to")


@promise()
async def image_files_can_be_linked(trial: PromiseTrial) -> None:
    """Two hard links of a file of the image share later changes through either name."""
    one = await trial.start()
    file = await image_file(one)
    link = f"{file}.link"
    script = f"set -e; ln {file} {link}; echo new > {file}; cat {link}; echo newer > {link}; cat {file}"
    same(await trial.sh(script, one), "new\nnewer\n", "what is read by the other name")


@promise()
async def modes_and_times_are_kept(trial: PromiseTrial) -> None:
    """Modes, with set-id and sticky bits, and times can be set and stay; new files have the usual ones."""
    script = f"""
        set -e; mkdir m{trial.mark}; cd m{trial.mark}; touch f; mkdir d; stat -c %a f d; chmod 4750 f; chmod 1777 d
        stat -c %a f d; touch -d @1000000000 f; stat -c %Y f; cp -p f g; stat -c %a:%Y g
    """
    wanted = "644\n755\n4750\n1777\n1000000000\n4750:1000000000\n"
    same(await trial.sh(script), wanted, "modes and times")


@promise("python3")
async def usual_folders_exist(trial: PromiseTrial) -> None:
    """The usual operations work: locks, maps, holes, files without a name, named pipes, sockets, SQLite."""
    same(await trial.python(program("use_file_system"), f"p{trial.mark}"), "fine\n", "what the program says in the end")


@promise()
async def programs_can_be_run_from_anywhere(trial: PromiseTrial) -> None:
    """A program in the working folder, in /tmp or in /root can be run from there."""
    for folder in (".", "/tmp", "/root"):
        script = (
            f"cd {folder}; printf '#!/bin/bash\\necho ran\\n' > p{trial.mark}; chmod +x p{trial.mark}; ./p{trial.mark}"
        )
        same(await trial.sh(f"{script}; rm p{trial.mark}"), "ran\n", f"what a script in {folder} prints")


@promise("git")
async def git_works(trial: PromiseTrial) -> None:
    """A repository can be created, committed to, branched, checked out, reset and cleaned."""
    script = f"""
        set -e; export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
        mkdir g{trial.mark}; cd g{trial.mark}; git init -q -b main
        mkdir d; echo one > d/f; git add .; git commit -qm one; git checkout -qb other
        rm -r d; echo two > d; git add -A; git commit -qm two; cat d; git checkout -q main; cat d/f
        echo three > d/f; echo new > n; git diff --stat | tail -n 1; git stash -qu; git status --short; cat d/f
    """
    wanted = "two\none\n 1 file changed, 1 insertion(+), 1 deletion(-)\none\n"
    same(await trial.sh(script), wanted, "what git and the files say")


@promise(time_s=120)
async def a_large_tree_can_be_copied_and_removed(trial: PromiseTrial) -> None:
    """Thousands of files are created, copied, moved and removed, and none is lost or left."""
    script = f"""
        set -e; mkdir t{trial.mark}; cd t{trial.mark}; mkdir -p a/{{1..30}}
        for i in {{1..30}}; do for j in {{1..{_FILES // 30}}}; do echo $i > a/$i/$j; done; done
        cp -a a b; mv a c; ls -R b c | grep -c '^[0-9][0-9]*$'; rm -r b c; ls -A | wc -l; cd ..; rmdir t{trial.mark}
    """
    counted, left = (await trial.sh(script, timeout_s=100)).split()
    same(int(counted), 2 * (_FILES + 30), "the number of names in both copies")
    same(left, "0", "what is left")


@promise()
async def changed_files_are_on_disk(trial: PromiseTrial) -> None:
    """More can be written than the 64 MiB that container runtimes reserve in memory for it."""
    script = (
        f"head -c {_LAYER_MB}000000 /dev/zero > big; sync big; stat -c %s big; rm big; df --output=fstype . | tail -n 1"
    )
    size, kind = (await trial.sh(script, await trial.start(), 60)).split()
    same(size, f"{_LAYER_MB}000000", "the size of the file")
    assert kind != "tmpfs", "it lies in memory"


@promise()
async def any_file_name_is_accepted(trial: PromiseTrial) -> None:
    """Names of 255 bytes, with any bytes, and folders nested hundreds deep can be created and removed."""
    script = f"""
        set -e; mkdir n{trial.mark}; cd n{trial.mark}; long=$(printf 'x%.0s' {{1..255}})
        touch -- $long $'\\xff\\xfe' $'a\\nb' ' ' -x; ls -A --zero | tr -dc '\\0' | wc -c
        mkdir -p $(printf '%s/' {{1..200}}); touch $(printf '%s/' {{1..200}})bottom
    """
    same(await trial.sh(script), "5\n", "the number of files")
    await trial.sh(f"rm -r n{trial.mark}; test ! -e n{trial.mark}")
