"""The promises of a sandbox, kept alike by both kinds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.errors import SandboxError, ToolError
from farm.request import SandboxSpec
from tests.contract.sandbox_kinds import mounts_with, processes_with, python, until
from workers.interfaces import Sandbox, SandboxProvider
from workers.sandboxes.images import image
from workers.sandboxes.owner import give
from workers.sandboxes.record import Record, folder, folder_of_all
from workers.sandboxes.sweep import sweep

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

STARTER = """
import asyncio, sys
from farm.request import SandboxSpec
from tests.contract.sandbox_kinds import PROVIDERS
sandbox = asyncio.run(PROVIDERS[{kind!r}]().start({sandbox_id!r}, SandboxSpec()))
print("up", flush=True)
sys.stdin.read()
"""


def sh(run: Run, sandbox: Sandbox, script: str, timeout_s: float = 10) -> str:
    """What a script prints; it must succeed."""
    result = run(sandbox.exec(["bash", "-c", script], timeout_s=timeout_s))
    assert (result.code, result.stderr) == (0, b"")
    return str(result.stdout.decode())


def assert_nothing_is_left(sandbox_id: str) -> None:
    assert not folder(sandbox_id).exists()
    assert not mounts_with(sandbox_id)
    assert not processes_with(sandbox_id)


def record_of(sandbox: Sandbox) -> Record:
    record = Record.load(folder(sandbox.sandbox_id))
    assert record
    return record


def test_streams_and_exit_code(sandbox: Sandbox, run: Run) -> None:
    result = run(sandbox.exec(["bash", "-c", "echo out; echo err >&2; exit 3"], timeout_s=5))
    assert (result.code, result.stdout, result.stderr, result.timed_out) == (3, b"out\n", b"err\n", False)


def test_a_signal_is_not_an_exit_code_of_zero(sandbox: Sandbox, run: Run) -> None:
    assert run(sandbox.exec(["bash", "-c", "kill -9 $$"], timeout_s=5)).code not in (0, None)


def test_a_command_that_is_not_there(sandbox: Sandbox, run: Run) -> None:
    result = run(sandbox.exec(["no-such-command"], timeout_s=5))
    assert result.code == 127
    assert b"no-such-command" in result.stderr


def test_arguments_are_not_interpreted(sandbox: Sandbox, run: Run) -> None:
    words = ["$HOME", "a b", "`id`", "'", '"', "*", "", "-n", "\n"]
    result = run(sandbox.exec(["printf", "%s|", *words], timeout_s=5))
    assert result.stdout.decode() == "".join(f"{word}|" for word in words)


def test_stdin(sandbox: Sandbox, run: Run) -> None:
    data = os.urandom(3_000_000)
    assert run(sandbox.exec(["cat"], timeout_s=20, stdin=data)).stdout == data
    assert run(sandbox.exec(["cat"], timeout_s=5)).stdout == b""


def test_long_output_is_cut_and_drained(sandbox: Sandbox, run: Run) -> None:
    result = run(sandbox.exec(["head", "-c", "50000000", "/dev/zero"], timeout_s=30))
    assert result.code == 0
    assert len(result.stdout) == 10_000_000


def test_time_limit_kills_all_of_the_command(sandbox: Sandbox, run: Run) -> None:
    begun = time.monotonic()
    script = "echo part; setsid sleep 4343 & (trap '' TERM; sleep 4343) & sleep 4343"
    result = run(sandbox.exec(["bash", "-c", script], timeout_s=0.5))
    assert time.monotonic() - begun < 3
    assert (result.code, result.timed_out, result.stdout) == (None, True, b"part\n")
    assert "4343" not in sh(run, sandbox, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; true").replace(
        "'4343", ""
    )


def test_what_stays_in_the_background_is_not_waited_for(sandbox: Sandbox, run: Run) -> None:
    begun = time.monotonic()
    assert sh(run, sandbox, "sleep 100 & echo done") == "done\n"
    assert time.monotonic() - begun < 5
    sh(run, sandbox, "pkill -f 'sleep 100'")


def test_cancelling_kills_the_command(sandbox: Sandbox, run: Run) -> None:
    async def cancelled() -> None:
        running = asyncio.create_task(sandbox.exec(["sleep", "4444"], timeout_s=100))
        await asyncio.to_thread(until, lambda: processes_with("sleep\x004444"), "it runs")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(cancelled())
    until(lambda: not processes_with("sleep\x004444"), "the command is gone")


def test_the_environment_is_chosen(sandbox: Sandbox, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_POLICY_KEY", "a-secret")
    seen = run(sandbox.exec(["env"], timeout_s=5, env={"MORE": "1"})).stdout.decode().splitlines()
    names = {line.partition("=")[0] for line in seen}
    assert {"GREETING=hello", "MORE=1", "HOME=/root"} <= set(seen)
    assert names <= {
        *("PATH", "HOME", "USER", "LANG", "TERM", "SHELL", "GREETING", "MORE"),
        *("PWD", "OLDPWD", "SHLVL", "_", "SANDBOX_COMMAND"),
    }
    everywhere = sh(run, sandbox, "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true")
    assert "a-secret" not in everywhere
    assert "FARM_" not in everywhere


def test_working_folder(sandbox: Sandbox, run: Run) -> None:
    assert sh(run, sandbox, "pwd") == "/workspace\n"
    assert run(sandbox.exec(["pwd"], timeout_s=5, cwd="/usr")).stdout == b"/usr\n"
    assert run(sandbox.exec(["pwd"], timeout_s=5, cwd="/none")).code == 126


def test_no_files_of_the_host(sandbox: Sandbox, run: Run, sandbox_settings: Path) -> None:
    (sandbox_settings / "of-the-host").write_text("secret")
    assert sh(run, sandbox, "ls /home /mnt /srv; test ! -e /etc/shadow; test ! -e /etc/ssh; cat /etc/hostname") == (
        "/home:\n\n/mnt:\n\n/srv:\nsandbox\n"
    )
    assert (
        sh(run, sandbox, f"test ! -e {sandbox_settings}/of-the-host && test ! -e {Path(__file__)} && echo none")
        == "none\n"
    )
    assert "/home/" not in sh(run, sandbox, "cat /etc/passwd")


def test_no_network(sandbox: Sandbox, run: Run) -> None:
    assert sh(run, sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo\n"
    code = (
        "import socket as s; a = s.create_server(('127.0.0.1', 0)); s.create_connection(a.getsockname()); print('lo')"
    )
    assert run(sandbox.exec(["python3", "-c", code], timeout_s=10)).stdout == b"lo\n"
    reach = run(sandbox.exec(["bash", "-c", "exec 3<>/dev/tcp/192.0.2.1/80"], timeout_s=5))
    assert b"unreachable" in reach.stderr


def test_own_processes_and_names(sandbox: Sandbox, run: Run) -> None:
    assert sh(run, sandbox, "cat /proc/1/comm; hostname") == "bash\nsandbox\n"
    assert len(sh(run, sandbox, "ls -d /proc/[0-9]*").split()) < 10
    assert sh(run, sandbox, "id -u; cut -d: -f2- /proc/self/cgroup | grep -v ':/$' || echo hidden") == "0\nhidden\n"


def test_root_inside_is_nobody_outside(sandbox: Sandbox, run: Run) -> None:
    assert sh(run, sandbox, "cat /proc/self/uid_map").split()[1] != "0"
    assert sh(run, sandbox, "grep NoNewPrivs /proc/self/status /proc/1/status | cut -f2") == "1\n1\n"
    for forbidden in ("echo x > /proc/sys/kernel/core_pattern", "mount -t tmpfs none /sys/fs && mknod /dev/x b 254 0"):
        assert run(sandbox.exec(["bash", "-c", forbidden], timeout_s=5)).code != 0


def test_limits_of_a_command(start: Start, run: Run) -> None:
    few = start(max_processes=30)
    assert sh(run, few, "ulimit -c; ulimit -u") == "0\n30\n"
    bomb = run(few.exec(["bash", "-c", "for i in {1..60}; do sleep 5 & done; wait -n; true"], timeout_s=1))
    assert b"Resource temporarily unavailable" in bomb.stderr or b"retry" in bomb.stderr
    shell = run(few.open_shell())
    assert run(shell.run("ulimit -u", 5)).output == "30\n"
    run(shell.close())


def test_the_image_may_be_changed_and_is_not(start: Start, run: Run) -> None:
    lower = image("host").folder
    before = sorted(str(path) for path in lower.rglob("*"))
    one = start()
    sh(
        run,
        one,
        "rm -rf /etc/ssl /srv; sed -i s/root/toor/ /etc/passwd; mv /media /media2; echo x > /etc/new; mkdir /srv",
    )
    assert sh(run, one, "grep -c toor /etc/passwd; cat /etc/new; ls -d /media2 /srv") == "1\nx\n/media2\n/srv\n"
    assert run(one.exec(["bash", "-c", "echo x > /usr/bin/new"], timeout_s=5)).code != 0
    assert sorted(str(path) for path in lower.rglob("*")) == before
    assert "toor" not in (lower / "etc/passwd").read_text()


def test_two_sandboxes_do_not_see_each_other(start: Start, run: Run) -> None:
    one, two = start(), start()
    sh(run, one, "echo mine > /workspace/file; (sleep 4545 >/dev/null 2>&1 &)")
    assert (
        sh(run, two, "ls -A /workspace; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 4[5]45' || true")
        == "0\n"
    )
    assert sh(run, one, "cat /workspace/file") == "mine\n"


def test_files(sandbox: Sandbox, run: Run) -> None:
    data = os.urandom(200_000) + b"\0\r\n"
    for path in ("/workspace/new folder/it's.bin", "plain.bin", "/-rf"):
        run(sandbox.write_file(path, data))
        assert run(sandbox.read_file(path)) == data
    run(sandbox.write_file("/workspace/empty", b""))
    assert run(sandbox.read_file("/workspace/empty")) == b""
    with pytest.raises(ToolError, match="/none: No such file"):
        run(sandbox.read_file("/none"))
    with pytest.raises(ToolError, match="directory"):
        run(sandbox.read_file("/usr"))
    with pytest.raises(ToolError, match="Read-only"):
        run(sandbox.write_file("/usr/bin/x", b""))


def test_a_link_leads_nowhere_outside(sandbox: Sandbox, run: Run, sandbox_settings: Path) -> None:
    secret = sandbox_settings / "behind-a-link"
    secret.write_text("secret")
    sh(run, sandbox, f"ln -sfn {secret} link; ln -sfn / up")
    with pytest.raises(ToolError):
        run(sandbox.read_file("/workspace/link"))
    run(sandbox.write_file("/workspace/up/tmp/below", b"inside"))
    assert sh(run, sandbox, "cat /tmp/below") == "inside"
    sh(run, sandbox, "rm /tmp/below")


def test_attaching_from_another_process(provider: SandboxProvider, start: Start, run: Run) -> None:
    one = start(env={"X": "1"})
    run(one.write_file("/workspace/file", b"left here"))
    other = python(
        "import asyncio\n"
        "from farm.request import SandboxSpec\n"
        "from tests.contract.sandbox_kinds import PROVIDERS\n"
        "async def main():\n"
        f"    provider = PROVIDERS[{provider.kind!r}]()\n"
        f"    sandbox = await provider.attach({one.sandbox_id!r}, SandboxSpec(env={{'X': '1'}}))\n"
        "    print((await sandbox.exec(['bash', '-c', 'cat file; echo $X'], timeout_s=5)).stdout.decode())\n"
        "    await sandbox.stop()\n"
        "asyncio.run(main())\n"
    )
    out, _ = other.communicate(timeout=30)
    assert out.strip() == "left here1"
    assert_nothing_is_left(one.sandbox_id)
    with pytest.raises(SandboxError, match=one.sandbox_id):
        run(one.exec(["true"], timeout_s=5))


def test_attaching_to_none(provider: SandboxProvider, run: Run) -> None:
    with pytest.raises(SandboxError, match="no-such"):
        run(provider.attach("no-such", SandboxSpec()))


def test_an_id_is_taken_once(provider: SandboxProvider, start: Start, run: Run) -> None:
    one = start()
    with pytest.raises(SandboxError, match=one.sandbox_id):
        run(provider.start(one.sandbox_id, SandboxSpec()))
    assert sh(run, one, "echo fine") == "fine\n"


@pytest.mark.parametrize("sandbox_id", ["", "..", "a/b", ".hidden"])
def test_an_id_is_a_plain_name(provider: SandboxProvider, run: Run, sandbox_id: str) -> None:
    with pytest.raises(SandboxError, match="plain name"):
        run(provider.start(sandbox_id, SandboxSpec()))


def test_stopping_leaves_nothing(start: Start, run: Run) -> None:
    one = start()
    sh(run, one, "mkdir -p a/b; chmod 000 a; (setsid sleep 4646 >/dev/null 2>&1 &)")
    sh(run, one, "cd /tmp; for i in {1..300}; do mkdir d; cd d; done")
    shell, kernel = run(one.open_shell()), run(one.open_kernel())
    run(one.stop())
    assert_nothing_is_left(one.sandbox_id)
    assert not processes_with("sleep\x004646")
    for call in (
        one.exec(["true"], timeout_s=5),
        shell.run("true", 5),
        kernel.run("1", 5),
        one.open_shell(),
        one.read_file("/x"),
    ):
        with pytest.raises(SandboxError, match=one.sandbox_id):
            run(call)
    run(shell.close())
    run(kernel.close())
    run(one.stop())


def test_a_sandbox_that_ends_while_a_command_runs(start: Start, run: Run) -> None:
    one = start()

    async def pulled() -> None:
        running = asyncio.create_task(one.exec(["sleep", "100"], timeout_s=100))
        await asyncio.to_thread(until, lambda: processes_with("sleep\x00100\x00"), "it runs")
        os.kill(record_of(one).first.pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await running

    run(pulled())
    until(lambda: not folder(one.sandbox_id).exists(), "the monitor has removed the folder")


def test_the_monitor_is_killed(start: Start, run: Run) -> None:
    one = start()
    sh(run, one, "(setsid sleep 4747 >/dev/null 2>&1 &)")
    os.kill(record_of(one).monitor.pid, signal.SIGKILL)
    until(lambda: not processes_with("sleep\x004747"), "no process is left")
    assert not mounts_with(one.sandbox_id)
    with pytest.raises(SandboxError):
        run(one.exec(["true"], timeout_s=5))
    others = {path.name for path in folder_of_all().iterdir()} - {one.sandbox_id}
    assert sweep(keep=lambda: others) == [one.sandbox_id]
    assert_nothing_is_left(one.sandbox_id)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_the_starter_dies(provider: SandboxProvider, death: int) -> None:
    sandbox_id = f"orphan-{provider.kind}-{death}"
    starter = python(STARTER.format(kind=provider.kind, sandbox_id=sandbox_id))
    assert starter.stdout
    assert starter.stdout.readline() == "up\n"
    assert folder(sandbox_id).exists()
    starter.send_signal(death)
    starter.communicate()
    until(lambda: not folder(sandbox_id).exists(), "the folder is gone")
    assert_nothing_is_left(sandbox_id)


def test_a_supervisors_lifeline_outlives_the_starter(provider: SandboxProvider, run: Run) -> None:
    sandbox_id = f"held-{provider.kind}"
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    code = STARTER.format(kind=provider.kind, sandbox_id=sandbox_id)
    starter = python(code, FARM_LIFELINE_FD=str(read_end), pass_fds=(read_end,))
    assert starter.stdout
    assert starter.stdout.readline() == "up\n"
    starter.kill()
    starter.communicate()
    attached = run(provider.attach(sandbox_id, SandboxSpec()))
    assert sh(run, attached, "echo alive") == "alive\n"
    os.close(write_end)
    until(lambda: not folder(sandbox_id).exists(), "the folder is gone")
    os.close(read_end)
    assert_nothing_is_left(sandbox_id)


def test_sweeping(start: Start, run: Run) -> None:
    kept, unwanted = start(), start()
    new, old = folder("just-made"), folder("long-dead")
    for path in (new, old):
        path.mkdir()
    os.utime(old, (0, 0))
    others = {path.name for path in folder_of_all().iterdir()} - {unwanted.sandbox_id, new.name, old.name}
    assert sweep(keep=lambda: others) == sorted([old.name, unwanted.sandbox_id])
    assert_nothing_is_left(unwanted.sandbox_id)
    assert new.exists()
    assert sh(run, kept, "echo alive") == "alive\n"
    assert sweep(keep=lambda: others, starting_s=0) == [new.name]


def test_what_starts_during_a_sweep_is_left_alone(start: Start, run: Run) -> None:
    start()
    before = {path.name for path in folder_of_all().iterdir()}
    during: list[Sandbox] = []

    def keep() -> set[str]:
        during.append(start())
        return before

    assert sweep(keep) == []
    assert sh(run, during[0], "echo alive") == "alive\n"


def test_a_start_that_fails_leaves_nothing(provider: SandboxProvider, run: Run, tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    tmp_path.chmod(0o755)
    with pytest.raises(SandboxError, match="did not start"):
        run(provider.start("broken", SandboxSpec(image=str(tmp_path))))
    assert_nothing_is_left("broken")
    with pytest.raises(SandboxError, match="no folder with a root file system"):
        run(provider.start("broken", SandboxSpec(image="/no/such/image")))
    assert_nothing_is_left("broken")


def test_python_of_its_own(sandbox: Sandbox, run: Run) -> None:
    code = "import sys, json; print(json.dumps([sys.version_info[:2], sys.prefix != sys.base_prefix]))"
    for name in ("python", "python3"):
        result = run(sandbox.exec([name, "-c", code], timeout_s=10))
        assert json.loads(result.stdout) == [[3, 11], True], result.stderr
    assert run(sandbox.exec(["python", "-c", "import pydantic"], timeout_s=10)).code == 1


def test_a_link_in_the_image_does_not_move_the_working_folder(
    provider: SandboxProvider, start: Start, run: Run, farm_folder: Path
) -> None:
    base = farm_folder / f"linked-{provider.kind}"
    base.mkdir()
    for name in ("usr", "etc"):
        (base / name).mkdir()
    for path in image("host").folder.iterdir():
        if path.is_symlink():
            (base / path.name).symlink_to(path.readlink())
    outside = farm_folder / f"outside-{provider.kind}"
    (base / "workspace").symlink_to(outside)
    give(base)
    with pytest.raises(SandboxError):
        start(image=str(base))
    assert not outside.exists()
