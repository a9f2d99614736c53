"""The farm under test: a database, a broker, nodes, engines and clients, all real processes that can be killed.

A part that exits is started again, after the pause of its fault. A part that exits without a fault is started again,
too, and recorded as a finding.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from sqlalchemy.engine import make_url

import farm
from examples.scripts import write_script
from farm.client.weight_update import WeightServer
from farm.embedded.child_process import ChildProcess
from farm.home import own_key
from farm.settings import Settings
from farm.store import migrations, nodes
from farm.store.database import Store
from tests.chaos import problems
from tests.chaos.client import Order
from tests.chaos.disk import free_disk, mount_disk, unmount_disk
from tests.chaos.processes import running, send
from tests.chaos.servers import BrokerUnderTest, Postgres
from tests.services.preloaded import end_server, program
from tests.services.servers.broker import free_ports
from tests.services.servers.line import Line
from tests.services.servers.skewed_clock import Skewed
from workers.testing.engine.model_text import write_model_text

_START_S = 90.0
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """Size and time limits of the farm. `lease_s` is also how long a silent node counts as alive."""

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
    """A process that is kept running.

    `due_at` is the time of its restart, `struck` tells that its death was intended.
    """

    name: str
    argv: list[str]
    env: dict[str, str]
    log: Path
    child: ChildProcess | None = None
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
        _, option, module, *words = self.argv
        if (option, module) == ("-m", "workers.node"):
            self.child = program(module, words, self.env, self.log)
        elif (Path(self.argv[0]).name, option) == ("farm", "api"):
            self.child = program("farm.cli.main", self.argv[1:], self.env, self.log)
        else:
            self.child = ChildProcess(self.argv, env=self.env, log=self.log)
        self.struck = False
        self.n_starts += 1

    def strike(self, number: signal.Signals, pause_s: float) -> None:
        """End it; it is restarted `pause_s` after its end."""
        assert self.child
        self.struck = True
        self.due_at = time.monotonic() + pause_s
        self.child.process.send_signal(number)


@dataclass(slots=True)
class Parts:
    """All parts of a farm, in a folder. `died` is called for exits that no fault explains."""

    folder: Path
    size: Size
    seed: int
    postgres: Postgres | None = None
    broker: BrokerUnderTest = field(init=False)
    nodes: list[Part] = field(default_factory=list)
    engines: list[Part] = field(default_factory=list)
    apis: list[Part] = field(default_factory=list)
    clients: list[Part] = field(default_factory=list)
    clock: Skewed | None = None
    """The database's clock, which may be set; None where each process has its own."""
    lines: dict[str, Line] = field(default_factory=dict)
    """The connection between a node and the database, by the node's name."""
    has_disk: bool = False
    """True if the sandboxes' disk is a separate file system."""
    died: list[str] = field(default_factory=list)
    store_url: str = ""
    store: Store = field(init=False)
    farm: farm.Farm = field(init=False)
    weights: WeightServer = field(init=False)
    urls: list[str] = field(default_factory=list)
    api_url: str = ""

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def all(self) -> list[Part]:
        return [*self.engines, *self.nodes, *self.apis, *self.clients]

    def start(self) -> None:
        """Start everything, until it is ready."""
        for name in ("logs", "clients", "home", "scratch", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        # clients may begin before the API is ready
        own_key(Settings(home=self.folder / "home"))
        self.has_disk = mount_disk(self.folder / "scratch")
        self._start_servers()
        for index in range(self.size.n_engines):
            self._start_engine(index)
        self.nodes = [self._node(f"node{index}") for index in range(self.size.n_nodes)]
        for node in self.nodes:
            node.start()
        self._await_all()
        for url in self.urls:
            self.farm.add_engine(f"{url}/v1")
        self.apis = [self._api("api0")]
        for api in self.apis:
            api.start()
        # a restarted scripted engine has lost its version, and has no weights to be pushed
        self.weights = self.farm.serve_weights(lambda engine, version: None)
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
        if self.postgres is not None:
            self.clock = Skewed(self.store)
            # its sessions were opened before this clock existed
            self.store.close()
            self.store = Store(self.store_url)
        self.farm = farm.connect(self.store_url, broker_url=self.broker.url)

    def _start_engine(self, index: int) -> None:
        script_file = self.folder / "script.jsonl"
        text = self.folder / "model"
        if not index:
            write_script(problems.script(), script_file)
            write_model_text(text)
            problems.write(self.folder / "clients" / "instances.jsonl")
        (port,) = free_ports(1)
        self.urls.append(f"http://127.0.0.1:{port}")
        argv = [sys.executable, "-m", "tests.doubles", "--book", str(script_file), "--seed", str(self.seed)]
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
            "FARM_STORE_URL": self._line_of(name),
            "FARM_BROKER_URL": self.broker.url,
            "FARM_LEASE_S": lease,
            "FARM_NODE_TIMEOUT_S": lease,
            "FARM_POLICY_TIMEOUT_S": "15",
            "FARM_SANDBOX": self.size.sandbox,
            "FARM_WARM_POOL": "2",
            # a separate folder shows what stays there
            "TMPDIR": str(self.folder / "tmp"),
        }
        return Part(name, argv, env, self.logs / f"{name}.log")

    def _line_of(self, name: str) -> str:
        """Return the database's URL for one node, through a proxy that can be cut."""
        if self.postgres is None:
            return self.store_url
        url = make_url(self.store_url)
        folder = str(url.query["host"])
        line = self.lines.setdefault(name, Line(Path(folder) / f".s.PGSQL.{url.port or 5432}"))
        through = url.set(host="127.0.0.1", port=line.port).difference_update_query(["host"])
        return through.render_as_string(hide_password=False)

    def second(self, node: Part) -> Part:
        """Start another node of the same name, as if on another machine."""
        scratch = {"FARM_SCRATCH": str(self.folder / "scratch" / "second")}
        return Part(node.name, node.argv, node.env | scratch, self.logs / f"{node.name}-second.log")

    def _api(self, name: str) -> Part:
        (port,) = free_ports(1)
        self.api_url = f"http://127.0.0.1:{port}"
        argv = [str(Path(sys.executable).parent / "farm"), "api", "--port", str(port), "--url", self.store_url]
        env = os.environ | {"FARM_HOME": str(self.folder / "home"), "FARM_BROKER_URL": self.broker.url}
        return Part(name, argv, env, self.logs / f"{name}.log")

    def _client(self, name: str) -> Part:
        order = self.order(name)
        # found by its environment variables, like the rest of the farm
        env = os.environ | {"FARM_HOME": str(self.folder / "home")}
        return Part(name, order.argv(), env, self.logs / f"{name}.log")

    @property
    def orders(self) -> list[Order]:
        """Return the instructions of all clients."""
        return [self.order(client.name) for client in self.clients]

    def order(self, name: str) -> Order:
        """Return a client's instructions: every second client uses the API, the others the database."""
        address = self.api_url if int(name.removeprefix("client")) % 2 else self.store_url
        return Order(name, self.seed, address, self.broker.url, str(self.folder / "clients"))

    def _await_all(self) -> None:
        deadline = time.monotonic() + _START_S
        while not (all(map(_answers, self.urls)) and self._n_up() == len(self.nodes)):
            if time.monotonic() > deadline or not all(part.running for part in self.all):
                raise RuntimeError(f"the farm did not start; see {self.logs}")
            time.sleep(0.1)

    def _n_up(self) -> int:
        return len(self.store.read(nodes.listing))

    def restart_dead(self) -> None:
        """Restart dead parts, each after its pause."""
        now = time.monotonic()
        for part in self.all:
            if part.running or part.ended:
                continue
            if part.child is not None:
                self._record_exit(part, now)
            elif now >= part.due_at:
                part.start()

    def _record_exit(self, part: Part, now: float) -> None:
        assert part.child
        code = part.child.process.returncode
        part.child = None
        if part in self.clients and code == 0:
            part.ended = True
        elif not part.struck:
            last = part.log.read_text(errors="replace").strip().splitlines()[-1:] if part.log.exists() else []
            self.died.append(f"{part.name} ended by itself ({code}): {' '.join(last)[-300:]}")
            part.due_at = now + _PAUSE_S

    def restore(self) -> None:
        """Undo everything that is down, frozen or full."""
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
        for line in self.lines.values():
            line.refuse()
            line.restore()
        if self.clock is not None:
            self.clock.set(0.0)
        free_disk(self.folder)

    def stop_clients(self) -> None:
        """Let the clients finish their batches, and begin no more."""
        (self.folder / "clients" / "stop").touch()

    def stop(self) -> None:
        """Stop everything, in an order that lets each part end by itself."""
        for parts in (self.clients, self.apis, self.nodes, self.engines):
            running = [part.child for part in parts if part.child is not None]
            for child in running:
                child.process.send_signal(signal.SIGCONT)
                child.terminate()
            for child in running:
                child.end(40.0)
        end_server()
        for line in self.lines.values():
            line.close()
        for name in ("weights", "farm", "store"):
            if hasattr(self, name):
                getattr(self, name).close()
        if hasattr(self, "broker"):
            self.broker.stop()
        if self.postgres is not None:
            self.postgres.stop()

    def remove_disk(self) -> None:
        """Remove it, after the search for leftovers."""
        if self.has_disk:
            unmount_disk(self.folder / "scratch")


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=2).status_code == 200
    except httpx2.HTTPError:
        return False
