"""A trainer of the load, in a separate process so that it can be killed: submits, streams groups, acknowledges.

`python -m tests.chaos.client JSON`. It writes groups to its journal before it acknowledges them, as a trainer does with
its checkpoint. The next client of its name continues its batch: it finds the batch by its idempotency key, and the
position by the acknowledged cursor.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import farm
from tests.chaos import problems

SUBMIT = "submit"
STREAM = "stream"
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Order:
    """A client's instructions. `folder` holds its journal; it begins no batch once `stop` exists."""

    name: str
    seed: int
    address: str
    broker_url: str
    folder: str

    @property
    def journal(self) -> Path:
        return Path(self.folder) / f"{self.name}.jsonl"

    @property
    def phase(self) -> Path:
        return Path(self.folder) / f"{self.name}.phase"

    @property
    def stop(self) -> Path:
        return Path(self.folder) / "stop"

    @property
    def instances(self) -> Path:
        return Path(self.folder) / "instances.jsonl"

    def request(self, number: int) -> farm.BatchRequest:
        """Return its n-th batch."""
        return problems.request(self.seed, self.name, number, problems.read(self.instances))

    def argv(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.client", json.dumps(asdict(self))]


def read(journal: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a journal."""
    if journal.exists():
        for line in journal.read_bytes().splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # its writer was killed in the middle
                continue


class Journal:
    """A client's persistent record of received groups, one per line."""

    def __init__(self, path: Path) -> None:
        begun = [line["begin"] for line in read(path) if "begin" in line]
        done = [line["done"] for line in read(path) if "done" in line]
        self.next = len(done)
        self.unfinished = bool(set(begun) - set(done))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, **line: Any) -> None:
        # on a new line even after an incomplete one
        os.write(self._file, b"\n" + json.dumps(line).encode() + b"\n")

    def record_group(self, group: farm.Group) -> None:
        """Record what a trainer would train on."""
        self.write(group_id=group.group_id, cursor=group.cursor, rollouts=_delivered_rollouts(group))


def run_batches(order: Order) -> None:
    """Run one batch after the other until there is a stop file; a batch that was begun is completed.

    If the farm is unreachable for longer than a client waits, it starts over from its journal, like a trainer that is
    restarted from its checkpoint.
    """
    while True:
        try:
            _run_until_stopped(order, Journal(order.journal))
            return
        except farm.ServiceError as error:
            print(f"starts again: {error}", file=sys.stderr, flush=True)
            time.sleep(_AGAIN_S)


def _run_until_stopped(order: Order, journal: Journal) -> None:
    with farm.connect(order.address, broker_url=order.broker_url) as client:
        while journal.unfinished or not order.stop.exists():
            _batch(order, journal, client)


def _batch(order: Order, journal: Journal, client: farm.Farm) -> None:
    number = journal.next
    request = order.request(number)
    journal.write(begin=number)
    order.phase.write_text(SUBMIT)
    batch_id = client.submit(request)
    journal.write(batch=number, batch_id=batch_id)
    order.phase.write_text(STREAM)
    for group in client.stream_groups(batch_id, consumer=order.name):
        journal.record_group(group)
        client.acknowledge(group, consumer=order.name)
    journal.write(done=number)
    journal.next, journal.unfinished = number + 1, False


def _delivered_rollouts(group: farm.Group) -> list[dict[str, Any]]:
    return [
        {
            "rollout_id": rollout.rollout_id,
            "state": rollout.state,
            "outcome": rollout.outcome,
            "reward": rollout.reward,
            "attempt": rollout.attempt,
            "finish_seq": rollout.finish_seq,
            "n_segments": len(rollout.segments),
        }
        for rollout in group.rollouts
    ]


if __name__ == "__main__":
    run_batches(Order(**json.loads(sys.argv[1])))
