"""Ports of farms that start concurrently on one machine: each has its own before anything listens there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from farm.embedded.farm_processes import FarmProcesses, free_port


def test_concurrently_starting_farms_get_different_ports(tmp_path: Path) -> None:
    first, second, wanted = FarmProcesses(tmp_path), FarmProcesses(tmp_path), free_port()
    ports = [first.port(wanted), second.port(wanted, "0.0.0.0"), first.port(wanted), first.port(), second.port()]
    assert ports[0] == wanted
    assert len(set(ports)) == 5
    second.stop(0.0)
    assert first.port(wanted) != wanted
    first.stop(0.0)
    assert second.port(wanted) == wanted, "it is free again once the farm has ended"
    second.stop(0.0)


def test_killed_farm_releases_its_claims(tmp_path: Path) -> None:
    wanted, (reader, writer) = free_port(), os.pipe()
    if not (child := os.fork()):
        FarmProcesses(tmp_path).port(wanted)
        os.write(writer, b"claimed")
        os._exit(9)
    assert os.read(reader, 7) == b"claimed"
    os.waitpid(child, 0)
    processes = FarmProcesses(tmp_path)
    assert processes.port(wanted) == wanted
    processes.stop(0.0)


def test_port_in_use_is_not_taken(tmp_path: Path) -> None:
    processes = FarmProcesses(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert processes.port(taken.getsockname()[1]) != taken.getsockname()[1]
    processes.stop(0.0)
