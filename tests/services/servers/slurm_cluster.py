"""A Slurm of several node daemons on one machine, each as good as a node: no root, no cgroups, nothing installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from testkit.deadline import Deadline
from testkit.private_server import Missing, private_folder

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
_START_S = 60.0
_PARTITIONS = {"cpu": "Default=YES", "big": "Default=NO"}
_CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/msock/s
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0,requeue_delay=1
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=60
KillWait={kill_wait_s}
MinJobAge=60
PropagateResourceLimits=NONE
"""


class SlurmCluster:
    """Nodes n1 to nN with `cpus` each, all of them in the partitions `cpu` and `big`; `config` is for SLURM_CONF."""

    def __init__(self, folder: Path, n_nodes: int, cpus: int, kill_wait_s: int) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self.names = [f"n{n}" for n in range(1, n_nodes + 1)]
        for name in ("state", "munge", "log", "msock"):
            (folder / name).mkdir(mode=0o755)
        (folder / "munge").chmod(0o700)
        (folder / "munge" / "key").write_bytes(os.urandom(128))
        (folder / "munge" / "key").chmod(0o600)
        port, host = _free_ports(n_nodes + 1), socket.gethostname().partition(".")[0]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        text = _CONFIGURATION.format(folder=folder, port=port, host=host, user=user, kill_wait_s=kill_wait_s)
        for n, name in enumerate(self.names):
            (folder / f"spool.{name}").mkdir()
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + 1 + n} CPUs={cpus}"
            text += " RealMemory=4000 State=UNKNOWN\n"
        for partition, more in _PARTITIONS.items():
            text += f"PartitionName={partition} Nodes={','.join(self.names)} {more} MaxTime=INFINITE State=UP\n"
        self.config.write_text(text)

    def start(self) -> None:
        munge = self.folder / "munge"
        self._run(
            *("munged", "--force", f"--key-file={munge}/key", f"--socket={self.folder}/msock/s", "--num-threads=2"),
            *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        self._run("slurmctld", "-f", str(self.config), "-c")
        for name in self.names:
            self._run("slurmd", "-f", str(self.config), "-N", name)
        deadline = Deadline(_START_S)
        while self.output_of("sinfo", "-h", "-t", "idle", "-p", "cpu", "-o", "%D") != str(len(self.names)):
            if deadline.passed():
                raise RuntimeError(
                    f"the Slurm did not start:\n{(self.folder / 'log/slurmctld.log').read_text()[-2000:]}"
                )
            time.sleep(0.1)

    def output_of(self, *words: str) -> str:
        """Return the output of a Slurm command."""
        return self._run(*words).strip()

    def stop(self) -> None:
        """End its jobs, then exactly the daemons that it started."""
        with suppress(subprocess.CalledProcessError):
            self._run("scancel", "--me")
            deadline = Deadline(60)
            while self.output_of("squeue", "-h") and not deadline.passed():
                time.sleep(0.2)
        files = [*self.folder.glob("slurmd.*.pid"), self.folder / "slurmctld.pid", self.folder / "munge" / "pid"]
        for number in (signal.SIGTERM, signal.SIGKILL):
            pids = [int(text) for file in files if file.exists() and (text := file.read_text().strip())]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = Deadline(10)
            while any(Path(f"/proc/{pid}").exists() for pid in pids) and not deadline.passed():
                time.sleep(0.05)

    def _run(self, *words: str) -> str:
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        env |= {"SLURM_CONF": str(self.config), "PATH": path}
        program = shutil.which(words[0], path=path) or words[0]
        return subprocess.run([program, *words[1:]], env=env, capture_output=True, text=True, check=True).stdout


@contextmanager
def slurm_cluster(n_nodes: int = 4, cpus: int = 2, kill_wait_s: int = 30) -> Iterator[SlurmCluster]:
    """Yield a new Slurm. Raises Missing."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    if missing := [name for name in _PROGRAMS if shutil.which(name, path=path) is None]:
        raise Missing(
            f"no {', '.join(missing)}: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
        )
    with private_folder() as folder:
        cluster = SlurmCluster(folder, n_nodes, cpus, kill_wait_s)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def _free_ports(n: int) -> int:
    """Return the first of so many consecutive free ports."""
    for first in range(17_000 + os.getpid() % 1000 * 20, 60_000, n):
        try:
            for port in range(first, first + n):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise Missing("there are no free ports in a row")
