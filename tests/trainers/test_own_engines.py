"""Trainers run rollouts on their own engines, by their own clients, without settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.trainers.conftest import SCRIPT, Program
from workers.testing.serving import serving


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[str, str]]:
    """The trainer's engine, which the farm does not know: its address and its model."""
    with serving(EngineDouble(SCRIPT, control=False).app()) as url:
        yield url, httpx2.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]


LISTED = {
    "id": "3c1efa8d-b791-4dde-8c61-7f1d539807f9",
    "model_id": "scripted-test-double",
    "priority": 50,
    "cost": 1.0,
    "worker_type": "regular",
    "is_healthy": True,
    "load": 0,
    "connection_mode": "HTTP",
    "disable_health_check": False,
}
"""A server as sglang-router 0.3.2 lists it, apart from its `url` and `metadata`."""


@pytest.fixture
def router(engine: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """SGLang's router in front of the trainer's server: its address, and that of the server."""
    with serving(EngineDouble(SCRIPT, wire="sglang", weight_version="2").app()) as server:

        async def workers(request: Request) -> JSONResponse:
            return JSONResponse({"workers": [{"url": server, **LISTED}], "total": 1})

        with serving(Starlette(routes=[Route("/workers", workers)])) as url:
            yield url, server


def test_slime_uses_the_servers_of_its_router(
    run: Program, router: tuple[str, str], model_text: Path, trainers: Path
) -> None:
    source = trainers / "slime"
    if not (source / "slime").exists():
        absent(f"the source of slime is not in {source}: tests/trainers/environment.sh could not fetch it")
    facts = run("own_engines", "slime", router[0], "", model_text, path=source)
    assert facts["same"] == [True] * 9
    assert (facts["engines"], facts["versions"], facts["exact"]) == ([f"{router[1]}/v1"], [2], True)
    assert facts["listed"].count("run:slime-own") == 1, "its two functions share the servers"


@pytest.mark.parametrize(("trainer", "version"), [("skyrl", 1), ("verl", 5), ("openrlhf", None)])
def test_rollouts_use_the_trainers_own_engine(
    run: Program, engine: tuple[str, str], model_text: Path, trainer: str, version: int | None
) -> None:
    facts = run("own_engines", trainer, *engine, model_text)
    assert facts["same"] == [True] * 4, "the rows are those that the trainer's own client returned"
    assert set(facts["rewards"]) <= {0.0, 1.0}
    assert facts["versions"] == [version]
    assert facts["exact"]
    # the bridge, and neither the farm's own engine nor the server behind the bridge
    assert (len(facts["engines"]), facts["n_shared"]) == (1, 0)
    assert facts["engines"][0] not in facts["listed"]
