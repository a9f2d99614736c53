"""The farm under test: a database, a broker, nodes, engines and clients, all real processes that can be lost.

What dies is started again, after the pause that its fault gave it. A part that dies though no fault struck it is
started again too, and noted: that is a finding.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

import farm
from benchmarks.chaos import problems
from benchmarks.chaos.client import Order
from benchmarks.chaos.processes import running, send
from benchmarks.chaos.servers import BrokerUnderTest, Postgres
from examples.plays import write_book
from farm.child import Child
from farm.store import migrations, nodes
from farm.store.engine import Store
from tests.services.broker import free_ports
from workers.testing.engine.model_text import write_model_text

_START_S = 90.0
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """How large the farm is, and how patient. `lease_s` is also how long a silent node counts as alive."""

    n_nodes: int = 3
    n_engines: int = 2
    n_clients: int = 6
    lease_s: float = 6.0
    latency_s: float = 2.0
    store: str = "postgres"
    broker: str = "redis"
    sandbox: str = "namespace"


@dataclass(slots=True)
class Part:
    """A process that is kept running. `due_at` is when it is started again, `struck` whether its death was wanted."""

    name: str
    argv: list[str]
    env: dict[str, str]
    log: Path
    child: Child | None = None
    due_at: float = 0.0
    struck: bool = False
    n_starts: int = 0
    ended: bool = False

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running

    @property
    def pid(self) -> int:
        assert self.child
        return self.child.pid

    def start(self) -> None:
        self.child = Child(self.argv, env=self.env, log=self.log)
        self.struck = False
        self.n_starts += 1

    def strike(self, number: signal.Signals, pause_s: float) -> None:
        """End it; it comes back `pause_s` after it has."""
        assert self.child
        self.struck = True
        self.due_at = time.monotonic() + pause_s
        self.child.process.send_signal(number)


@dataclass(slots=True)
class Parts:
    """All of it, in a folder. `died` is told of deaths that no fault explains."""

    folder: Path
    size: Size
    seed: int
    postgres: Postgres | None = None
    broker: BrokerUnderTest = field(init=False)
    nodes: list[Part] = field(default_factory=list)
    engines: list[Part] = field(default_factory=list)
    clients: list[Part] = field(default_factory=list)
    died: list[str] = field(default_factory=list)
    store_url: str = ""
    store: Store = field(init=False)
    farm: farm.Farm = field(init=False)
    urls: list[str] = field(default_factory=list)

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def all(self) -> list[Part]:
        return [*self.engines, *self.nodes, *self.clients]

    def start(self) -> None:
        """Everything, until it can play."""
        for name in ("logs", "clients", "home", "scratch", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        self._start_servers()
        for index in range(self.size.n_engines):
            self._start_engine(index)
        self.nodes = [self._node(f"node{index}") for index in range(self.size.n_nodes)]
        for node in self.nodes:
            node.start()
        self._await_all()
        for url in self.urls:
            self.farm.add_engine(f"{url}/v1")
        self.clients = [self._client(f"client{index}") for index in range(self.size.n_clients)]
        for client in self.clients:
            client.start()

    def _start_servers(self) -> None:
        self.broker = BrokerUnderTest(self.size.broker)
        self.store_url = f"sqlite:///{self.folder}/farm.db"
        if self.size.store == "postgres":
            self.postgres = Postgres()
            self.store_url = self.postgres.url
        self.store = Store(self.store_url)
        migrations.migrate(self.store)
        self.farm = farm.connect(self.store_url, broker_url=self.broker.url)

    def _start_engine(self, index: int) -> None:
        book = self.folder / "plays.jsonl"
        text = self.folder / "model"
        if not index:
            write_book(problems.book(), book)
            write_model_text(text)
            problems.write(self.folder / "clients" / "instances.jsonl")
        (port,) = free_ports(1)
        self.urls.append(f"http://127.0.0.1:{port}")
        argv = [sys.executable, "-m", "workers.testing.engine", "--book", str(book), "--seed", str(self.seed)]
        argv += ["--model-text", str(text), "--port", str(port), "--latency-s", str(self.size.latency_s)]
        self.engines.append(Part(f"engine{index}", argv, dict(os.environ), self.logs / f"engine{index}.log"))
        self.engines[-1].start()

    def _node(self, name: str) -> Part:
        argv = [sys.executable, "-m", "workers.node", "--init", "2", "--run", "8", "--eval", "2", "--grace", "4"]
        argv += ["--log-dir", str(self.logs / name)]
        lease = f"{self.size.lease_s:g}"
        env = os.environ | {
            "FARM_NODE": name,
            "FARM_HOME": str(self.folder / "home"),
            "FARM_SCRATCH": str(self.folder / "scratch"),
            "FARM_STORE_URL": self.store_url,
            "FARM_BROKER_URL": self.broker.url,
            "FARM_LEASE_S": lease,
            "FARM_NODE_TIMEOUT_S": lease,
            "FARM_POLICY_TIMEOUT_S": "15",
            "FARM_SANDBOX": self.size.sandbox,
            "FARM_STOCK": "2",
            # a folder of its own shows what stays there
            "TMPDIR": str(self.folder / "tmp"),
        }
        return Part(name, argv, env, self.logs / f"{name}.log")

    def _client(self, name: str) -> Part:
        order = self.order(name)
        # found by what its environment names, as the rest of the farm is
        env = os.environ | {"FARM_HOME": str(self.folder / "home")}
        return Part(name, order.argv(), env, self.logs / f"{name}.log")

    @property
    def orders(self) -> list[Order]:
        """What the clients were told."""
        return [self.order(client.name) for client in self.clients]

    def order(self, name: str) -> Order:
        return Order(name, self.seed, self.store_url, self.broker.url, str(self.folder / "clients"))

    def _await_all(self) -> None:
        deadline = time.monotonic() + _START_S
        while not (all(map(_answers, self.urls)) and self._n_up() == len(self.nodes)):
            if time.monotonic() > deadline or not all(part.running for part in self.all):
                raise RuntimeError(f"the farm did not start; see {self.logs}")
            time.sleep(0.1)

    def _n_up(self) -> int:
        return len(self.store.read(nodes.listing))

    def tend(self) -> None:
        """Start again what has died, each after its pause."""
        now = time.monotonic()
        for part in self.all:
            if part.running or part.ended:
                continue
            if part.child is not None:
                self._buried(part, now)
            elif now >= part.due_at:
                part.start()

    def _buried(self, part: Part, now: float) -> None:
        assert part.child
        code = part.child.process.returncode
        part.child = None
        if part in self.clients and code == 0:
            part.ended = True
        elif not part.struck:
            last = part.log.read_text(errors="replace").strip().splitlines()[-1:] if part.log.exists() else []
            self.died.append(f"{part.name} ended by itself ({code}): {' '.join(last)[-300:]}")
            part.due_at = now + _PAUSE_S

    def mend(self) -> None:
        """Whatever is down, frozen or full is so no more."""
        if self.postgres is not None and not self.postgres.running:
            self.postgres.start()
        if not self.broker.running:
            self.broker.start()
        if self.broker.frozen:
            self.broker.thaw()
        if self.broker.full:
            self.broker.fill(False)
        for node in self.nodes:
            for each in running(node.pid, "") if node.running else ():
                send(each, signal.SIGCONT)

    def stop_clients(self) -> None:
        """Let them finish their batches, and begin no more."""
        (self.folder / "clients" / "stop").touch()

    def stop(self) -> None:
        """Everything, in an order that lets each end by itself."""
        for parts in (self.clients, self.nodes, self.engines):
            running = [part.child for part in parts if part.child is not None]
            for child in running:
                child.process.send_signal(signal.SIGCONT)
                child.terminate()
            for child in running:
                child.end(40.0)
        for name in ("farm", "store"):
            if hasattr(self, name):
                getattr(self, name).close()
        if hasattr(self, "broker"):
            self.broker.stop()
        if self.postgres is not None:
            self.postgres.stop()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=2).status_code == 200
    except httpx2.HTTPError:
        return False
