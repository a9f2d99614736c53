"""The trainers' own examples run on the farm with the lines from the docs, and the documented commands are valid."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.trainers.conftest import PROGRAMS, ROOT, SCRIPT, VERIFIERS, Program, verifiers_of
from workers.testing.serving import serving


def test_script_of_trl_trains_through_the_farm(run: Program, model_text: Path) -> None:
    facts = run("own_examples/trl_script", model_text, path=PROGRAMS)
    assert facts["steps"] == [1, 2, 3]
    assert facts["added"] == 5, "the number of lines in docs/how-to/users/trainers.md"
    assert any(0 < entry["reward"] < 1 for entry in facts["logs"])
    assert any(entry["grad_norm"] > 0 for entry in facts["logs"])


def test_asynchronous_trainer_of_trl_trains_through_the_farm(run: Program, model_text: Path) -> None:
    facts = run("own_examples/trl_async_script", model_text, path=PROGRAMS)
    assert facts["steps"] == [1, 2, 3]
    assert facts["finite"]
    assert any(0 < reward < 1 for reward in facts["rewards"])
    first, *later = facts["pushed"]
    assert first["engines"] == 1, "the initial weights are pushed before the first rollout"
    assert later
    assert later[-1]["sum"] != first["sum"], "the trained weights are pushed"
    assert facts["version"] == str(facts["model_version"])


@pytest.mark.parametrize("name", ["docs/how-to/users/trainers/verl.md", "examples/trainers/verl_farm.py"])
def test_command_for_verl_is_parsed_by_verl(run: Program, name: str) -> None:
    _, _, rest = (ROOT / name).read_text().replace("\\\n", " ").partition("-m verl.trainer.main_ppo ")
    command, dots, _ = rest.partition(" ...")
    assert dots
    facts = run("own_examples/verl_command", *shlex.split(command))
    assert facts["manager"] in {"my_farm.Manager", "verl_farm.Manager"}


def test_orchestrator_of_prime_rl_trains_through_the_farm(run: Program, trainers: Path, model_text: Path) -> None:
    source, release = trainers / "prime-rl", verifiers_of(trainers, VERIFIERS[1])
    if not (source / "packages").exists():
        absent(f"the source of prime-rl is not in {source}: tests/trainers/environment.sh could not fetch it")
    loaded = []

    async def update(request: Request) -> Response:
        loaded.append((await request.json())["weight_dir"])
        return Response()

    app = EngineDouble(SCRIPT, model=str(model_text), weight_version="0").app()
    app.router.routes.append(Route("/update_weights", update, methods=["POST"]))
    with serving(app) as engine:
        program = "own_examples/prime_rl_orchestrator"
        facts = run(program, f"{engine}/v1", model_text, source, path=PROGRAMS, release=release)
    assert len(facts["steps"]) == 3
    for step in facts["steps"]:
        assert 0 < step["credited"] <= step["trained"] < step["tokens"]
    assert [Path(each).name for each in loaded][:2] == ["step_0", "step_1"]
    assert (facts["progress"], facts["failed"]) == (4, 0)
    # two problems at steps 1, 2 and 4
    assert facts["evaluated"] == [True] * 6
