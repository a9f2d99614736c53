"""The raw operation for comparison with sandboxes: the container runtime's own instances, as the same ordinary user."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from testkit.scratch_folder import sandbox_config
from workers.sandboxes.images import runtime
from workers.sandboxes.sandbox_user import drop_privileges, give, sandbox_user

ISOLATED = ("--containall", "--net", "--network", "none")
"""Isolation options equal to our sandboxes', except for the writable layer, which would make it slower."""
_END_S = 20.0


class RawApptainer:
    """The runtime's command with its state in a private folder."""

    def __init__(self, folder: Path) -> None:
        config = sandbox_config()
        program, user = runtime.program(config), sandbox_user(config.user)
        if runtime.exposure(config)[0]:
            raise RuntimeError(f"{program} is not accessible to user {user}: move it")
        folder.mkdir()
        give(folder, config.user)
        drop = drop_privileges(config.user) if user else ()
        self.words = [*drop, str(program), "-s"]
        self.env = dict.fromkeys(("HOME", "APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR"), str(folder))
        self.env["PATH"] = ":".join([str(Path(str(program)).parent), os.defpath, "/usr/sbin", "/sbin"])
        self.folder = folder

    def run(self, *words: str) -> str:
        """Run the command and return its output. Raises RuntimeError if it fails."""
        done = subprocess.run(
            [*self.words, *words],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr[-500:]}")
        return done.stdout

    def start(self, image: Path) -> str:
        """Start an instance and return its name."""
        name = f"instance-{uuid4().hex[:12]}"
        # to a file: the instance keeps its standard error open, so a pipe would not end
        with (self.folder / "log").open("a") as log:
            done = subprocess.run(
                [*self.words, "instance", "start", *ISOLATED, str(image), name],
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if done.returncode:
            raise RuntimeError(f"instance start: {(self.folder / 'log').read_text()[-500:]}")
        return name

    def pids(self) -> dict[str, int]:
        """Return the first process of each instance, by the instance's name."""
        return {one["instance"]: one["pid"] for one in json.loads(self.run("instance", "list", "--json"))["instances"]}

    def kill_all(self) -> None:
        """End all instances. Not by `instance stop`, which takes seconds where the host's first process is slow."""
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                process = os.pidfd_open(pid)
                signal.pidfd_send_signal(process, signal.SIGKILL)
                poll = select.poll()
                poll.register(process, select.POLLIN)
                poll.poll(_END_S * 1000)
                os.close(process)


@contextmanager
def instance(raw: RawApptainer, image: Path) -> Iterator[str]:
    """Yield the name of a running instance."""
    name = raw.start(image)
    try:
        yield name
    finally:
        raw.kill_all()
