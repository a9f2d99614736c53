"""Running and ended processes, and killing them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from testkit.deadline import LONG_S
from tests.services.farms import until
from workers.sandboxes.isolation.namespaces import started_at
from workers.sandboxes.lifecycle.state import Process
from workers.sandboxes.processes.process_tree import MARK, Lineage, kill_tagged, new_tag, tagged_processes


def test_process_is_alive_until_it_ends() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process(child.pid, started_at(child.pid))
        assert process.alive()
        assert not Process(child.pid, process.started - 1).alive()
        assert process.end(signal.SIGTERM, 5)
        # it is a zombie now
        assert not process.alive()
    assert not process.alive()
    assert process.end(signal.SIGTERM, 5)


def test_another_process_with_the_same_pid_is_not_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert Process(child.pid, 1).end(signal.SIGKILL, 5)
        assert child.poll() is None
        child.kill()


def test_process_that_ignores_sigterm_is_killed() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        process = Process(child.pid, started_at(child.pid))
        assert not process.end(signal.SIGTERM, 0.05)
        assert process.end(signal.SIGKILL, 5)


def test_all_processes_with_a_tag_are_found_and_killed() -> None:
    mark = new_tag()
    script = "setsid sleep 60 & sleep 60 & echo up; wait"
    with subprocess.Popen(
        ["bash", "-c", script], env={MARK: mark, "PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout
        child.stdout.readline()
        assert child.pid in tagged_processes(mark)
        assert tagged_processes(new_tag()) == []
        kill_tagged(mark)
        assert child.wait(LONG_S) == -signal.SIGKILL
    assert tagged_processes(mark) == []


def test_killed_process_that_gets_no_cpu_counts_as_ended() -> None:
    """A killed process ends once it runs, which takes long if another process occupies the processor."""
    core, mark = min(os.sched_getaffinity(0)), new_tag()

    def rarely() -> None:
        os.sched_setaffinity(0, {core})
        os.nice(19)

    program = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    for _ in range(3):
        with subprocess.Popen(["sleep", "60"], env={MARK: mark}, executable=shutil.which("sleep"), preexec_fn=rarely):
            until(lambda: n_sleeping(mark) == 1, "it runs")
            with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as busy:
                assert busy.stdout is not None
                busy.stdout.readline()
                kill_tagged(mark)
                ended = tagged_processes(mark) == []
                busy.kill()
            assert ended


_PR_SET_CHILD_SUBREAPER = 36


def n_sleeping(mark: str) -> int:
    """Return how many of the processes with a tag are `sleep`."""
    n = 0
    for pid in tagged_processes(mark):
        # a process may have ended before its exec
        with contextlib.suppress(OSError):
            n += Path("/proc", str(pid), "cmdline").read_bytes().startswith(b"sleep\0")
    return n


def _reap() -> None:
    """Let orphans become this process's children, as those of a sandbox become its first process's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def test_only_the_lineage_is_killed_whichever_thread_forked_it() -> None:
    mark = new_tag()
    fork = "import subprocess, threading; threading.Thread(target=lambda: subprocess.run(['sleep', '60'])).start()"
    script = f'setsid {sys.executable} -c "{fork}" & sleep 60 & echo up; wait'
    env = {MARK: mark, "PATH": "/usr/bin:/bin"}
    with (
        subprocess.Popen(["bash", "-c", f"({script})"], env=env, stdout=subprocess.PIPE, preexec_fn=_reap) as reaper,
        subprocess.Popen(["sleep", "60"], env=env) as other,
    ):
        assert reaper.stdout
        reaper.stdout.readline()
        # a process has no tag for a moment during its exec, and outlives its parent here
        until(lambda: n_sleeping(mark) == 3, "all of them run")
        kill_tagged(mark, Lineage(leader=0, reaper=reaper.pid))
        assert set(tagged_processes(mark)) <= {reaper.pid, other.pid}
        kill_tagged(mark, Lineage(leader=reaper.pid, reaper=0))
        reaper.wait(LONG_S)
        assert tagged_processes(mark) == [other.pid]
        kill_tagged(mark, Lineage(leader=reaper.pid, reaper=reaper.pid))
        assert other.poll() is None
        other.kill()
