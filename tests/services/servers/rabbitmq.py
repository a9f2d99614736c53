"""A private RabbitMQ, run by the user of the tests; it keeps its messages across restarts, as RabbitMQ does."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from testkit.deadline import LONG_S
from testkit.private_server import Missing, private_folder, running
from tests.services.apptainer import HOME
from tests.services.servers.broker import Broker, free_ports

_CONFIG = """
disk_free_limit.absolute = 50MB
raft.wal_max_size_bytes = 16777216
log.console.level = warning
"""
# two schedulers without busy waiting, as all tests share the machine
_ERLANG = "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
_START_S = 120.0
_URL = "amqp://guest:guest@127.0.0.1:{port}//"
_HIGH_WATER = 0.4  # RabbitMQ's default


@contextmanager
def rabbitmq_broker() -> Iterator[Broker]:
    """Yield a new RabbitMQ that answers; its first start takes some seconds. Raises Missing."""
    programs = rabbitmq_programs()
    amqp, distribution, epmd = free_ports(3)
    with private_folder() as folder:
        env = _environment(programs, folder, amqp, distribution, epmd)
        (folder / "rabbitmq.conf").write_text(_CONFIG)
        (folder / "plugins").write_text("[].")
        control = partial(_control, env)
        # Erlang would start one by itself, and leave it behind
        names = [_program_path("epmd", env), "-port", str(epmd), "-address", "127.0.0.1"]
        with (
            running(names, lambda: _listens(epmd), folder / "epmd.log"),
            Broker(
                _URL.format(port=amqp),
                amqp,
                _URL,
                lambda: running(
                    ["env", *(f"{name}={value}" for name, value in env.items()), _program_path("rabbitmq-server", env)],
                    lambda: _greets(amqp),
                    folder / "server.log",
                    stop=signal.SIGKILL,
                    start_s=_START_S,
                ),
                cut=lambda: control("close_all_connections", "a test"),
                full=lambda full: control("set_vm_memory_high_watermark", "0.000001" if full else str(_HIGH_WATER)),
            ) as broker,
        ):
            yield broker


def rabbitmq_programs() -> list[Path]:
    """Return the folders of RabbitMQ's and Erlang's programs: those that `make rabbitmq` unpacked, else the machine's.

    Raises Missing.
    """
    unpacked = HOME / "rabbitmq"
    if (unpacked / "rabbitmq" / "sbin").is_dir():
        return [unpacked / "rabbitmq" / "sbin", unpacked / "usr" / "bin"]
    # on PATH, distributions have a wrapper that only root may start
    installed = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin"))
    if installed and shutil.which("erl") and shutil.which("epmd"):
        return [installed[-1]]
    raise Missing("no RabbitMQ: run `make rabbitmq`")


def _environment(programs: list[Path], folder: Path, amqp: int, distribution: int, epmd: int) -> dict[str, str]:
    return {
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "ERL_EPMD_PORT": str(epmd),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": "farm@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(amqp),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _ERLANG,
        # then the script becomes the server, instead of monitoring it
        "RUNNING_UNDER_SYSTEMD": "true",
    }


def _program_path(program: str, env: dict[str, str]) -> str:
    result = shutil.which(program, path=env["PATH"])
    if result is None:
        raise Missing(f"RabbitMQ has no {program}: run `make rabbitmq`")
    return result


def _control(env: dict[str, str], *arguments: str) -> None:
    command = [_program_path("rabbitmqctl", env), "-q", *arguments]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=LONG_S, cwd="/")


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def _greets(port: int) -> bool:
    """Return whether it greets: its port is open some time before that."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
            connection.settimeout(1.0)
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return len(connection.recv(8)) == 8
    except OSError:
        return False
