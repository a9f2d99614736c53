"""What a worker writes of an attempt while it is played: artefacts, by names of their own and up to a cap."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial

import pytest

from farm.rollout import Stage
from farm.store import artefacts, migrations
from farm.store.engine import Store
from farm.store.rollouts import Claim
from tests.contract.test_store import advance, claimed, fail, new_batch, place
from workers.interfaces import Artefact
from workers.worker import Recorder


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store(store_url)
    migrations.migrate(opened)
    yield opened
    opened.close()


@pytest.fixture
def held(store: Store) -> Claim:
    batch_id = new_batch(store)
    place(store, batch_id)
    advance(store, claimed(store, f"{batch_id}.0.0", Stage.INIT))
    return claimed(store, f"{batch_id}.0.0", Stage.RUN)


def keep(recorder: Recorder, *artefacts: tuple[int, str, bytes]) -> list[str]:
    async def all_of_them() -> list[str]:
        return [await recorder.keep(index, Artefact(name, "text/plain", data)) for index, name, data in artefacts]

    return asyncio.run(all_of_them())


def test_names_are_new_and_fit_for_files(store: Store, held: Claim) -> None:
    names = (
        "out.txt",
        "out.txt",
        "out.txt",
        "../../etc/é passwd",
        "no-dot",
        "no-dot",
        "",
        ".hidden",
        "x" * 300 + ".png",
    )
    given = keep(Recorder(store, held, 1.0), *((3, name, name.encode()) for name in names))
    assert given[:3] == ["3-out.txt", "3-out-2.txt", "3-out-3.txt"]
    assert given[4:6] == ["3-no-dot", "3-no-dot-2"]
    assert given[8].endswith("xxx.png")
    assert len(set(given)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") and len(name) <= 100 for name in given)
    for name, asked in zip(given, names, strict=True):
        assert store.read(partial(artefacts.contents, rollout_id=held.rollout_id, name=name)) == asked.encode()


def test_the_cap_counts_what_is_stored(store: Store, held: Claim) -> None:
    recorder = Recorder(store, held, 0.1)
    random = os.urandom(60_000)
    given = keep(recorder, (0, "a", b"a" * 5_000_000), (1, "b", random), (2, "c", random), (3, "d", b"small"))
    assert given == ["0-a", "1-b", "", "3-d"]
    found = store.read(lambda connection: artefacts.listing(connection, held.rollout_id))
    assert [(each.name, each.n_bytes) for each in found] == [("0-a", 5_000_000), ("1-b", 60_000), ("3-d", 5)]
    assert sum(each.n_stored for each in found) <= 100_000


def test_who_has_lost_the_claim_keeps_nothing(store: Store, held: Claim) -> None:
    recorder = Recorder(store, held, 1.0)
    assert fail(store, held, 0.0)
    assert keep(recorder, (0, "a", b"late")) == [""]
    assert store.read(lambda connection: artefacts.listing(connection, held.rollout_id)) == []
