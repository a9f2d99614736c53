"""E2B's own client, unchanged, on the farm: each check is a function; failures are reported by name."""

import asyncio
import io
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

given = json.loads(sys.argv[1])
os.environ |= {"E2B_API_KEY": given["key"], "E2B_API_URL": given["url"], "E2B_SANDBOX_URL": given["url"]}

from e2b import (  # type: ignore[import-not-found]  # noqa: E402 - the addresses are read from the environment
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    TemplateException,
    TimeoutException,
)

Check = Callable[[Sandbox], None]


def error_of(call: Callable[..., Any], *arguments: Any, **values: Any) -> Any:
    """Return the exception of a call."""
    try:
        result = call(*arguments, **values)
    except Exception as error:
        return error
    raise AssertionError(f"{call} returned {result!r:.200}")


def raised(kind: type[Exception], call: Callable[..., Any], *arguments: Any, **values: Any) -> str:
    """Return the message of a call's exception, which must be of exactly this class."""
    error = error_of(call, *arguments, **values)
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    return str(error)


def commands(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("echo out; echo err >&2")
    assert (done.stdout, done.stderr, done.exit_code, done.error) == ("out\n", "err\n", 0, None), done
    assert sandbox.commands.run("").exit_code == 0
    assert sandbox.commands.run("echo $A-$B", envs={"A": "é", "B": "x y"}).stdout == "é-x y\n"
    assert sandbox.commands.run("pwd", cwd="/usr").stdout == "/usr\n"
    assert sandbox.commands.run("whoami", user="root").stdout == "root\n"
    assert sandbox.commands.run("echo $GIVEN").stdout == "at creation\n"
    assert sandbox.commands.run("printf 'é漢😀'").stdout == "é漢😀"
    assert sandbox.commands.run("cat").stdout == "", "without input a command reads end of file"
    assert sandbox.commands.run("echo a; sleep 0.01; echo b").stdout == "a\nb\n"


def failing_commands(sandbox: Sandbox) -> None:
    for script, code in (("exit 3", 3), ("doesntexit", 127), ("kill -9 $$", -1), ("false", 1)):
        error = error_of(sandbox.commands.run, f"echo so far; {script}")
        assert isinstance(error, CommandExitException), (script, error)
        assert (error.exit_code, error.stdout) == (code, "so far\n"), (script, error)
    assert "user" in raised(AuthenticationException, sandbox.commands.run, "true", user="klingon")


def time_limits(sandbox: Sandbox) -> None:
    began = time.monotonic()
    raised(TimeoutException, sandbox.commands.run, "echo $$ >/tmp/late; sleep 600", timeout=1)
    assert time.monotonic() - began < 30
    for _ in range(100):
        if not sandbox.commands.list():
            break
        time.sleep(0.1)
    assert not sandbox.commands.list(), "a command that timed out was killed"
    assert sandbox.commands.run("sleep 0.1; echo on", timeout=0).stdout == "on\n"


def streamed_output(sandbox: Sandbox) -> None:
    seen: list[tuple[str, float]] = []
    done = sandbox.commands.run(
        "for i in 1 2 3; do echo $i; sleep 0.3; done; echo bad >&2",
        on_stdout=lambda text: seen.append((text, time.monotonic())),
        on_stderr=lambda text: seen.append((f"err:{text}", time.monotonic())),
    )
    assert [text for text, _ in seen] == ["1\n", "2\n", "3\n", "err:bad\n"], seen
    assert seen[2][1] - seen[0][1] > 0.4, "output arrives as it is written"
    assert done.stdout == "1\n2\n3\n"


def large_output(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("yes 0123456789 | head -c 20000000; echo end", timeout=120)
    assert len(done.stdout) == 20_000_004
    assert done.stdout.endswith("end\n")


def background_commands(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("echo begun; sleep 600", background=True)
    [listed] = sandbox.commands.list()
    assert (listed.pid, listed.cmd, listed.args[-1]) == (handle.pid, "/bin/bash", "echo begun; sleep 600"), listed
    assert next(iter(handle))[0] == "begun\n"
    assert str(handle.pid) in sandbox.commands.run("pgrep sleep; ps -e -o pid= || ls /proc").stdout.split()
    assert handle.kill() is True
    assert handle.kill() is False
    assert sandbox.commands.kill(2**31) is False
    server = sandbox.commands.run("for i in $(seq 600); do echo $i; sleep 0.05; done", background=True)
    server.disconnect()
    found = sandbox.commands.connect(server.pid)
    lines = [out for _, (out, _, _) in zip(range(5), found, strict=False)]
    assert all(line and line.strip().isdigit() for line in lines), lines
    assert sandbox.commands.kill(server.pid)
    raised(NotFoundException, sandbox.commands.connect, server.pid)
    many = [sandbox.commands.run(f"sleep 0.2; echo {n}", background=True) for n in range(40)]
    assert [handle.wait().stdout for handle in many] == [f"{n}\n" for n in range(40)]


def inputs(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "one\n")
    handle.send_stdin(b"two\n")
    sandbox.commands.stream_input(handle.pid, ("three\n", "four\n"))
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one\ntwo\nthree\nfour\n"
    raised(NotFoundException, sandbox.commands.send_stdin, handle.pid, "x")
    without = sandbox.commands.run("sleep 600", background=True)
    raised(InvalidArgumentException, sandbox.commands.send_stdin, without.pid, "x")
    without.kill()


def terminals(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), envs={"PS1": "$ "})
    output = bytearray()
    reader = threading.Thread(target=lambda: _taken(terminal, output))
    reader.start()
    sandbox.pty.send_stdin(terminal.pid, b"stty size; test -t 1 && echo 'a te''rminal'\n")
    _until(lambda: b"24 80" in output and b"a terminal" in output, output)
    sandbox.pty.resize(terminal.pid, PtySize(rows=30, cols=100))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; echo $TERM\n")
    _until(lambda: b"30 100" in output and b"xterm-256color" in output, output)
    sandbox.pty.send_stdin(terminal.pid, b"sleep 600\n")
    sandbox.pty.send_stdin(terminal.pid, b"\x03")
    sandbox.pty.send_stdin(terminal.pid, b"exit 4\n")
    reader.join(30)
    assert not reader.is_alive()
    assert b"exited with code 4" in output, bytes(output[-300:])


def _taken(handle: Any, output: bytearray) -> None:
    try:
        handle.wait(on_pty=output.extend)
    except CommandExitException as error:
        output.extend(str(error).encode())


def _until(holds: Callable[[], bool], output: bytearray) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, bytes(output[-500:])
        time.sleep(0.02)


def files(sandbox: Sandbox) -> None:
    place = "/workspace/new/folder/f.txt"
    told = sandbox.files.write(place, "é\r\nx")
    assert (told.path, told.name, told.type) == (place, "f.txt", FileType.FILE), told
    assert sandbox.files.read(place) == "é\r\nx"
    assert sandbox.files.read(place, format="bytes") == "é\r\nx".encode()
    assert b"".join(sandbox.files.read(place, format="stream")) == "é\r\nx".encode()
    data = bytes(range(256)) * 40_000
    for values in ({}, {"use_octet_stream": True}, {"gzip": True}):
        sandbox.files.write("binary", data, **values)
        assert sandbox.files.read("/workspace/binary", format="bytes") == data, values
    sandbox.files.write("stream", io.BytesIO(data))
    assert sandbox.files.read("stream", format="bytes") == data
    both = sandbox.files.write_files([{"path": "a/1", "data": "1"}, {"path": "/tmp/é 2", "data": b"2"}])
    assert [each.path for each in both] == ["/workspace/a/1", "/tmp/é 2"], both
    assert (sandbox.files.read("a/1"), sandbox.files.read("/tmp/é 2")) == ("1", "2")
    assert sandbox.files.write("empty", "").name == "empty"
    assert sandbox.files.read("empty") == ""
    raised(FileNotFoundException, sandbox.files.read, "/nothere")
    raised(InvalidArgumentException, sandbox.files.read, "/tmp")
    raised(InvalidArgumentException, sandbox.files.write, "/tmp", "x")
    raised(TemplateException, sandbox.files.write, "x", "x", metadata={"a": "b"})


def entries(sandbox: Sandbox) -> None:
    assert sandbox.files.make_dir("/workspace/made/deep") is True
    assert sandbox.files.make_dir("/workspace/made/deep") is False
    sandbox.files.write("/workspace/made/f", "12345")
    raised(InvalidArgumentException, sandbox.files.make_dir, "/workspace/made/f")
    sandbox.commands.run("ln -s f made/link; chmod 750 made/f")
    found = {entry.name: entry for entry in sandbox.files.list("/workspace/made")}
    kinds = {name: entry.type for name, entry in found.items()}
    assert kinds == {"deep": FileType.DIR, "f": FileType.FILE, "link": FileType.SYMLINK}, kinds
    file = found["f"]
    assert (file.size, file.mode, file.permissions, file.owner, file.group) == (5, 0o750, "-rwxr-x---", "root", "root")
    assert abs(file.modified_time.timestamp() - time.time()) < 300
    assert found["link"].symlink_target == "f"
    below = [entry.path for entry in sandbox.files.list("/workspace/made", depth=3)]
    assert "/workspace/made/deep" in below
    assert (sandbox.files.exists("made/f"), sandbox.files.exists("/nothere")) == (True, False)
    assert sandbox.files.get_info("made/f").path == "/workspace/made/f"
    raised(FileNotFoundException, sandbox.files.get_info, "/nothere")
    raised(FileNotFoundException, sandbox.files.list, "/nothere")
    raised(InvalidArgumentException, sandbox.files.list, "/workspace/made/f")
    moved = sandbox.files.rename("made/f", "/workspace/other/g")
    assert (moved.path, moved.size) == ("/workspace/other/g", 5)
    raised(FileNotFoundException, sandbox.files.rename, "made/f", "x")
    sandbox.files.remove("/workspace/made")
    sandbox.files.remove("/workspace/made")
    assert not sandbox.files.exists("/workspace/made")
    raised(SandboxException, sandbox.files.watch_dir, "/workspace")


def states(sandbox: Sandbox) -> None:
    assert sandbox.is_running()
    info = sandbox.get_info()
    assert (info.sandbox_id, info.template_id, info.metadata) == (sandbox.sandbox_id, "base", {"who": "me"}), info
    assert (info.state.value, info.memory_mb) == ("running", 4096)
    left_s = info.end_at.timestamp() - time.time()
    assert 200 < left_s <= 301, left_s
    assert abs(info.started_at.timestamp() - time.time()) < 300
    sandbox.set_timeout(900)
    assert 800 < sandbox.get_info().end_at.timestamp() - time.time() <= 901
    again = Sandbox.connect(sandbox.sandbox_id, timeout=60)
    assert again.commands.run("echo $GIVEN").stdout == "at creation\n"
    assert sandbox.get_info().end_at.timestamp() - time.time() > 700, "connecting does not shorten it"
    Sandbox.connect(sandbox.sandbox_id, timeout=1800)
    assert sandbox.get_info().end_at.timestamp() - time.time() > 1700


def listings(sandbox: Sandbox) -> None:
    others = [Sandbox.create(metadata={"who": "other", "n": str(n)}, timeout=60) for n in range(3)]
    try:
        pages = Sandbox.list(query=SandboxQuery(metadata={"who": "other"}), limit=2)
        first = pages.next_items()
        assert ([info.metadata["n"] for info in first], pages.has_next) == (["2", "1"], True), first
        assert [info.metadata["n"] for info in pages.next_items()] == ["0"]
        assert not pages.has_next
        assert len(Sandbox.list().next_items()) == 4
        assert not Sandbox.list(query=SandboxQuery(metadata={"who": "nobody"})).next_items()
    finally:
        for other in others:
            assert other.kill() is True
    assert others[0].kill() is False
    assert len(Sandbox.list().next_items()) == 1


def ended_sandboxes(sandbox: Sandbox) -> None:
    other = Sandbox.create(timeout=60)
    handle = other.commands.run("echo begun; sleep 600", background=True)
    assert next(iter(handle))[0] == "begun\n"
    Sandbox.kill(other.sandbox_id)
    assert other.is_running() is False
    for call in (lambda: other.commands.run("true"), lambda: other.files.read("/etc/passwd"), handle.wait):
        words = raised(NotRunning, call)
        assert "not found" in words, words
    raised(SandboxNotFoundException, other.get_info)
    raised(SandboxNotFoundException, other.set_timeout, 60)
    raised(SandboxNotFoundException, Sandbox.connect, other.sandbox_id)
    raised(SandboxNotFoundException, Sandbox.connect, "never-there")


def refusals(sandbox: Sandbox) -> None:
    raised(AuthenticationException, Sandbox.create, api_key="wrong")
    assert "nowhere" in raised(SandboxException, Sandbox.create, "/nowhere.sif", timeout=60)
    for field, value in (("mcp", {"github": {}}), ("network", {"deny_out": ["0.0.0.0/0"]}), ("timeout", 10**6)):
        wanted: dict[str, Any] = {field: value}
        assert f"400: {field}" in raised(SandboxException, Sandbox.create, **wanted), field
    raised(SandboxException, sandbox.pause)
    assert len(Sandbox.list().next_items()) == 1, "a refused call leaves no sandbox"


def idempotent(sandbox: Sandbox) -> None:
    one, same = (Sandbox.create(timeout=60, idempotency_key="the-same-key") for _ in range(2))
    assert one.sandbox_id == same.sandbox_id
    assert one.kill()


def side_by_side(sandbox: Sandbox) -> None:
    async def all_at_once() -> None:
        other = await AsyncSandbox.create(timeout=120)
        try:
            done = await asyncio.gather(*(other.commands.run(f"sleep 0.1; echo {n}") for n in range(30)))
            assert [each.stdout for each in done] == [f"{n}\n" for n in range(30)]
            names = [f"/tmp/many/{n}" for n in range(30)]
            await asyncio.gather(*(other.files.write(name, name) for name in names))
            assert await asyncio.gather(*map(other.files.read, names)) == names
            seen: list[str] = []
            handle = await other.commands.run("echo x; sleep 600", background=True, on_stdout=seen.append)
            for _ in range(100):
                if seen:
                    break
                await asyncio.sleep(0.05)
            assert seen == ["x\n"]
            assert await handle.kill()
        finally:
            await other.kill()

    asyncio.run(all_at_once())


import e2b  # noqa: E402

NotRunning = getattr(e2b, "SandboxNotRunningException")  # noqa: B009 - not of all releases
CHECKS: list[Check] = [
    *(commands, failing_commands, time_limits, streamed_output, large_output, background_commands, inputs, terminals),
    *(files, entries, states, listings, ended_sandboxes, refusals, idempotent, side_by_side),
]


def main() -> dict[str, Any]:
    failures: dict[str, str] = {}
    sandbox = Sandbox.create(timeout=300, envs={"GIVEN": "at creation"}, metadata={"who": "me"})
    if given.get("waits"):
        print(json.dumps(sandbox.sandbox_id), flush=True)
        sandbox.commands.run("touch /tmp/begun; sleep 600", timeout=0)
    for check in CHECKS:
        try:
            check(sandbox)
        except Exception:
            failures[check.__name__] = traceback.format_exc()[-1500:]
    sandbox.kill()
    return {"version": e2b.__version__ if hasattr(e2b, "__version__") else "", "n": len(CHECKS), "failures": failures}


print(json.dumps(main()), flush=True)
