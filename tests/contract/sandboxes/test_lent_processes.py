"""Background processes in a borrowed sandbox, and its files, on each kind of sandbox."""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from farm.errors import Conflict, InvalidRequest, NotFound, Overloaded
from farm.records.lending.sandbox_calls import (
    ExecCall,
    ListFilesCall,
    ListProcessesCall,
    MakeFolderCall,
    MoveFileCall,
    ProcessOutput,
    RemoveFileCall,
    ResizeProcessCall,
    SignalProcessCall,
    StartProcessCall,
    TerminalSize,
    WatchProcessCall,
    WriteCall,
    WriteProcessCall,
)
from farm.records.request_values import Request
from testkit.deadline import LONG_S
from tests.contract.sandboxes.sandbox_kinds import own_seconds, processes_with
from tests.services.farms import until
from workers.config import own_config
from workers.lending import lent_process
from workers.lending.lent_process import MAX_KEPT
from workers.lending.lent_sandbox import LentSandbox
from workers.plugins.interfaces import Sandbox

Run = Callable[[Any], Any]
Lend = Callable[[Callable[["Lent"], Coroutine[Any, Any, Any]]], Any]


class Lent:
    """A borrowed sandbox, as served by its worker."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.lent = LentSandbox(own_config().sandboxes, sandbox, "token", 600)

    async def call(self, call: Request) -> Any:
        return await self.lent.answer(call, "")

    async def start(self, script: str, **values: Any) -> str:
        """Return the id of a process that runs a script."""
        state = await self.call(StartProcessCall(argv=["bash", "-c", script], **values))
        return str(state.process_id)

    async def all_of(self, process: str, after: int = 0) -> tuple[dict[str, bytes], ProcessOutput]:
        """Return the output of a process by stream, and its end."""
        streams: dict[str, bytes] = {}
        while True:
            shown: ProcessOutput = await self.call(WatchProcessCall(process=process, after=after, timeout_s=30))
            for piece in shown.pieces:
                streams[piece.stream] = streams.get(piece.stream, b"") + b64decode(piece.data)
            after = shown.next
            if shown.ended:
                return streams, shown

    async def first_of(self, process: str, after: int = 0) -> tuple[bytes, int]:
        """Return the first output of a process, and its end offset."""
        shown: ProcessOutput = await self.call(WatchProcessCall(process=process, after=after, timeout_s=30))
        return b"".join(b64decode(piece.data) for piece in shown.pieces), shown.next

    async def write(self, process: str, data: bytes, **values: Any) -> None:
        await self.call(WriteProcessCall(process=process, data=b64encode(data).decode(), **values))


@pytest.fixture
def lend(sandbox: Sandbox, run: Run) -> Lend:
    """Yield a function that runs a coroutine with a borrowed sandbox, and then releases its processes."""

    async def lending(body: Callable[[Lent], Coroutine[Any, Any, Any]]) -> Any:
        lent = Lent(sandbox)
        try:
            return await body(lent)
        finally:
            await lent.lent.leave()

    return lambda body: run(lending(body))


def test_output_is_reported_by_stream_with_the_exit_code(lend: Lend) -> None:
    async def body(lent: Lent) -> None:
        process = await lent.start("echo out; echo err >&2; exit 3")
        streams, end = await lent.all_of(process)
        assert streams == {"stdout": b"out\n", "stderr": b"err\n"}
        assert (end.code, end.timed_out, end.limit, end.n_dropped) == (3, False, "", 0)
        assert (await lent.all_of(process))[0] == streams, "it is kept to be read again"
        late, end = await lent.all_of(process, after=end.next)
        assert (late, end.ended) == ({}, True)
        missing = await lent.call(StartProcessCall(argv=["doesntexit"]))
        streams, end = await lent.all_of(missing.process_id)
        assert (end.code, b"doesntexit" in streams["stderr"]) == (127, True)
        where = await lent.start("pwd; echo $A", cwd="/usr", env={"A": "é"})
        assert (await lent.all_of(where))[0]["stdout"] == "/usr\né\n".encode()

    lend(body)


def test_output_is_streamed_as_it_is_written(lend: Lend) -> None:
    async def body(lent: Lent) -> None:
        process = await lent.start("echo one; read x; echo two $x", stdin=True)
        first, after = await lent.first_of(process)
        assert first == b"one\n"
        watching = asyncio.create_task(lent.first_of(process, after))
        from_now = asyncio.create_task(
            lent.call(WatchProcessCall(process=process, timeout_s=30)), name="who comes later sees what comes later"
        )
        await asyncio.sleep(0.05)
        assert not watching.done()
        await lent.write(process, b"more\n")
        assert (await watching)[0] == b"two more\n"
        assert b64decode((await from_now).pieces[0].data) == b"two more\n"
        idle = await lent.start("sleep 600")
        nothing = await lent.call(WatchProcessCall(process=idle, after=0, timeout_s=0.05))
        assert (nothing.pieces, nothing.ended, nothing.next) == ((), False, 0)

    lend(body)


def test_input_is_written_and_closed(lend: Lend) -> None:
    async def body(lent: Lent) -> None:
        process = await lent.start("sha256sum", stdin=True)
        data = bytes(range(256)) * 20_000
        await lent.write(process, data[:1_000_000])
        await lent.write(process, data[1_000_000:])
        await lent.write(process, b"", close=True)
        await lent.write(process, b"", close=True)
        streams, _ = await lent.all_of(process)
        assert streams["stdout"].split()[0].decode() == hashlib.sha256(data).hexdigest()
        with pytest.raises(Conflict, match="0 of 1 bytes"):
            await lent.write(process, b"x")
        without = await lent.start("cat")
        assert (await lent.all_of(without))[0] == {}, "without an input it reads its end"
        with pytest.raises(InvalidRequest, match="stdin"):
            await lent.write(without, b"x")
        deaf = await lent.start("sleep 600", stdin=True)
        with pytest.raises(Conflict, match="does not read"):
            await lent.write(deaf, data, timeout_s=0.2)
        closes = await lent.start("exec <&-; echo closed; sleep 600", stdin=True)
        assert (await lent.first_of(closes))[0] == b"closed\n"
        with pytest.raises(Conflict, match="input is closed"):
            await lent.write(closes, b"x")

    lend(body)


def test_terminal_has_a_size_and_is_resized(lend: Lend) -> None:
    async def body(lent: Lent) -> None:
        reads = 'while read x; do echo "<$x>"; done'
        script = f"trap 'stty size' WINCH; test -t 0 && test -t 1 && test -t 2 && stty size; {reads}"
        process = await lent.start(script, terminal=TerminalSize(rows=7, columns=33))
        assert await lent.first_of(process) == (b"7 33\r\n", 6)
        await lent.call(ResizeProcessCall(process=process, terminal=TerminalSize(rows=9, columns=44)))
        await lent.write(process, b"hello\n")
        text, after = b"", 6
        # a shell handles a signal once it has read its line
        while b"<hello>\r\n" not in text or b"9 44\r\n" not in text:
            more, after = await lent.first_of(process, after)
            text += more
        await lent.write(process, b"\x04")
        streams, end = await lent.all_of(process, after)
        assert (list(streams) in ([], ["terminal"]), end.code) == (True, 0)
        plain = await lent.start("sleep 600")
        with pytest.raises(InvalidRequest, match="terminal"):
            await lent.call(ResizeProcessCall(process=plain, terminal=TerminalSize()))

    lend(body)


def test_signals_are_delivered_and_kill_leaves_nothing(lend: Lend) -> None:
    async def body(lent: Lent) -> None:
        process = await lent.start("trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done")
        _, after = await lent.first_of(process)
        await lent.call(SignalProcessCall(process=process, signal="TERM"))
        streams, end = await lent.all_of(process, after)
        assert (streams["stdout"], end.code) == (b"caught\n", 5)
        await lent.call(SignalProcessCall(process=process, signal="TERM"))
        seconds = own_seconds()
        parent = await lent.start(f"trap '' TERM; setsid sleep {seconds} & echo ready; wait; wait")
        await lent.first_of(parent)
        await lent.call(SignalProcessCall(process=parent, signal="TERM"))
        await lent.call(SignalProcessCall(process=parent, signal="KILL"))
        _, end = await lent.all_of(parent)
        assert end.code == -9
        await asyncio.to_thread(until, lambda: not processes_with(f"sleep\0{seconds}"), "all it started is gone")

    lend(body)


def test_time_limit_ends_a_process_and_its_children(lend: Lend) -> None:
    async def body(lent: Lent) -> None:
        seconds = own_seconds()
        process = await lent.start(f"setsid sleep {seconds} & echo ready; wait", limit_s=0.3)
        streams, end = await lent.all_of(process)
        assert (streams["stdout"], end.code, end.timed_out) == (b"ready\n", -9, True)
        await asyncio.to_thread(until, lambda: not processes_with(f"sleep\0{seconds}"), "all it started is gone")

    lend(body)


def test_processes_are_found_by_id_pid_and_label(lend: Lend) -> None:
    async def body(lent: Lent) -> None:
        process = await lent.start("echo $$; sleep 600", label="server", env={"A": "b"}, cwd="/tmp")
        [state] = (await lent.call(ListProcessesCall())).processes
        assert (state.process_id, state.label, state.cwd, dict(state.env)) == (process, "server", "/tmp", {"A": "b"})
        assert state.argv[0] == "bash"
        assert (await lent.first_of("server"))[0] == b"%d\n" % state.pid, "its number is the one that it sees itself"
        assert (await lent.first_of(str(state.pid)))[0] == b"%d\n" % state.pid
        inside = await lent.call(ExecCall(argv=["bash", "-c", f"kill -KILL {state.pid}"]))
        assert inside.code == 0
        assert (await lent.all_of(process))[1].code == -9
        assert (await lent.call(ListProcessesCall())).processes == ()
        for name in ("server", str(state.pid), "process-0", "none"):
            with pytest.raises(NotFound, match="no process"):
                await lent.call(SignalProcessCall(process=name, signal="KILL"))

    lend(body)


def test_watcher_gets_all_output_and_others_lose_the_oldest(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    # a busy machine may take long between two calls
    monkeypatch.setattr("workers.lending.lent_process._WATCHED_S", LONG_S)
    n_bytes = 5 * MAX_KEPT

    async def body(lent: Lent) -> None:
        script = f"head -c {n_bytes} /dev/zero | tr '\\0' x; echo end"
        streams, end = await lent.all_of(await lent.start(script))
        assert (len(streams["stdout"]), end.n_dropped, end.code) == (n_bytes + 4, 0, 0)
        slow = await lent.start(script)
        _, after = await lent.first_of(slow)
        await asyncio.sleep(0.3)
        shown = await lent.call(WatchProcessCall(process=slow, after=after, timeout_s=1))
        assert shown.n_dropped == 0, "it waits for who watched a moment ago"
        await lent.all_of(slow, shown.next)
        # a small piece before large ones, whose sizes do not add up to the buffer
        uneven = await lent.start(f"head -c 1000 /dev/zero; sleep 0.2; {script}")
        for _ in range(2):
            shown = await lent.call(WatchProcessCall(process=uneven, after=0, timeout_s=5))
            assert shown.n_dropped == 0
            await asyncio.sleep(0.7)
        streams, end = await lent.all_of(uneven)
        assert (len(streams["stdout"]), end.n_dropped) == (n_bytes + 1004, 0)

    lend(body)


def test_unwatched_process_continues(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.lending.lent_process._WATCHED_S", 0.2)

    async def body(lent: Lent) -> None:
        process = await lent.start(f"head -c {5 * MAX_KEPT} /dev/zero | tr '\\0' x; echo end; sleep 600 & exit 0")
        end: ProcessOutput
        while True:
            await asyncio.sleep(0.2)
            end = await lent.call(WatchProcessCall(process=process, timeout_s=0.001))
            if end.ended:
                break
        first = await lent.call(WatchProcessCall(process=process, after=0, timeout_s=1))
        assert 4 * MAX_KEPT - 100_000 < first.n_dropped <= 4 * MAX_KEPT + 4
        streams, end = await lent.all_of(process)
        assert streams["stdout"].endswith(b"end\n")
        assert len(streams["stdout"]) + first.n_dropped == 5 * MAX_KEPT + 4

    lend(body)


def test_background_process_survives_its_own_output(lend: Lend) -> None:
    async def body(lent: Lent) -> None:
        script = "(for i in $(seq 40); do echo $i; sleep 0.02; done; touch /tmp/all-told) & echo begun"
        streams, end = await lent.all_of(await lent.start(script))
        assert (streams["stdout"][:6], end.code) == (b"begun\n", 0)
        for _ in range(200):
            if (await lent.call(ExecCall(argv=["test", "-e", "/tmp/all-told"]))).code == 0:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("it was ended")

    lend(body)


def test_numbers_of_running_and_ended_processes_are_limited(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_process, "MAX_RUNNING", 3)
    monkeypatch.setattr(lent_process, "MAX_ENDED", 2)

    async def body(lent: Lent) -> None:
        begun = await asyncio.gather(*(lent.start("sleep 600") for _ in range(3)))
        with pytest.raises(Overloaded, match="3 processes"):
            await lent.start("true")
        await lent.call(SignalProcessCall(process=begun[0], signal="KILL"))
        ended = [begun[0]]
        for _ in range(3):
            ended.append(await lent.start("true"))
            await lent.all_of(ended[-1])
        await lent.start("true")
        with pytest.raises(NotFound):
            await lent.all_of(ended[1])
        assert (await lent.all_of(ended[-1]))[1].ended
        assert (await lent.all_of(ended[0]))[1].code == -9, "nobody had read its end"

    lend(body)


def test_files_are_listed_moved_and_removed(lend: Lend, sandbox: Sandbox) -> None:
    async def body(lent: Lent) -> None:
        for name in ("b/c/d", "b/a", "z"):
            await lent.call(WriteCall(path=f"/workspace/tree/{name}", data=b64encode(b"12345").decode()))
        await lent.call(ExecCall(argv=["sh", "-c", "cd /workspace/tree; ln -s nowhere l; mkfifo p; chmod 750 z"]))
        found = (await lent.call(ListFilesCall(path="tree"))).files
        assert [(entry.name, entry.kind, entry.target) for entry in found] == [
            *(("b", "folder", ""), ("l", "link", "nowhere"), ("p", "other", ""), ("z", "file", ""))
        ]
        file = found[-1]
        assert (file.path, file.size, file.mode, file.owner, file.group) == (
            *("/workspace/tree/z", 5, 0o750, "root", "root"),
        )
        deep = (await lent.call(ListFilesCall(path="/workspace/tree", depth=3))).files
        below = [entry.path.removeprefix("/workspace/tree/") for entry in deep]
        assert below == ["b", "l", "p", "z", "b/a", "b/c", "b/c/d"]
        [link] = (await lent.call(ListFilesCall(path="tree/l", depth=0))).files
        assert (link.kind, link.target) == ("link", "nowhere")
        await lent.call(MoveFileCall(path="tree/b", target="/workspace/other/new/b"))
        await lent.call(MoveFileCall(path="/workspace/other/new/b/a", target="/dev/shm/a"))
        [moved] = (await lent.call(ListFilesCall(path="/dev/shm/a", depth=0))).files
        assert moved.size == 5
        await lent.call(MakeFolderCall(path="made/deep"))
        for call, words in (
            (MakeFolderCall(path="made/deep"), "File exists"),
            (MakeFolderCall(path="tree/z"), "File exists"),
            (MakeFolderCall(path="tree/z/x"), "Not a directory"),
            (ListFilesCall(path="tree/z"), "Not a directory"),
            (ListFilesCall(path="nothere"), "No such file or directory"),
            (ListFilesCall(path="nothere", depth=0), "No such file or directory"),
            (MoveFileCall(path="nothere", target="x"), "No such file or directory"),
            (RemoveFileCall(path="nothere"), "No such file or directory"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await lent.call(call)
        await lent.call(RemoveFileCall(path="tree/l"))
        await lent.call(RemoveFileCall(path="tree"))
        await lent.call(RemoveFileCall(path="/workspace/other"))
        assert "tree" not in [entry.name for entry in (await lent.call(ListFilesCall(path="/workspace"))).files]

    lend(body)


def test_links_do_not_lead_outside_the_sandbox(lend: Lend, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")

    async def body(lent: Lent) -> None:
        await lent.call(ExecCall(argv=["ln", "-s", str(tmp_path), "/tmp/out"]))
        with pytest.raises(InvalidRequest, match="No such file"):
            await lent.call(ListFilesCall(path="/tmp/out/secret", depth=0))
        await lent.call(ExecCall(argv=["sh", "-c", "mkdir -p /tmp/up; echo y >/tmp/up/kept; ln -s /tmp/up /tmp/in"]))
        await lent.call(RemoveFileCall(path="/tmp/in"))
        [kept] = (await lent.call(ListFilesCall(path="/tmp/up"))).files
        assert kept.name == "kept", "the link is removed, and not what it leads to"

    lend(body)
    assert (tmp_path / "secret").exists()
