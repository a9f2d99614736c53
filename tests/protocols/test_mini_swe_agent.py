"""mini-swe-agent's own command in a borrowed sandbox: it fixes a real bug there, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import farm
from farm.embedded.embedded_farm import Embedded
from tests.agents.issue_rollout import FIX, SWE
from tests.doubles import EngineDouble
from tests.protocols.conftest import Start, result_of
from tests.services.api import KEY, RestartableApi
from workers.testing.scripted_model import OrderedScript, ScriptedCall, ScriptedTurn
from workers.testing.serving import serving

EXAMPLES = Path(__file__).parents[2] / "examples" / "swe_rex"
COMMANDS = (
    "git init -q && git add -A && git -c user.name=x -c user.email=x@x commit -qm given && pwd",
    "sleep 60",
    FIX,
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; git diff",
)


def test_command_fixes_an_issue_in_a_borrowed_sandbox(
    here: tuple[Embedded, RestartableApi], start: Start, tmp_path: Path
) -> None:
    turns = [
        ScriptedTurn(content="I go on.", tool_calls=(ScriptedCall(name="bash", arguments={"command": each}),))
        for each in COMMANDS
    ]
    double = EngineDouble(OrderedScript(turns, SWE.problem_statement[:60]))
    spec = SWE.spec()
    environment = {
        "environment_class": "mini_swe_environment.MiniSweEnvironment",
        "url": here[1].url,
        "spec": spec.model_dump(mode="json", exclude_defaults=True),
        "cwd": spec.workdir,
        "timeout": 5,
    }
    config = [f"environment.{name}={json.dumps(value)}" for name, value in environment.items()]
    words = ["mini.yaml", *config, "model.cost_tracking=ignore_errors"]
    with serving(double.app()) as engine, farm.connect(here[0].home) as client:
        given = {
            "examples": str(EXAMPLES),
            "key": KEY,
            "engine": f"{engine}/v1",
            "folder": str(tmp_path),
            "arguments": [
                *(word for each in words for word in ("-c", each)),
                *("-m", f"openai/{double.machine.name}", "-t", SWE.problem_statement, "-y", "--exit-immediately"),
            ],
        }
        said = result_of(start("mini-swe-agent", "mini_swe_loop", given), tmp_path / "mini_swe_loop.err")
        assert not client.sandboxes.list(), "it was released"
    assert said["end"] == "Submitted"
    added = [line for line in str(SWE.patch).splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added
    assert set(added) <= set(said["submission"].splitlines())
    first, slow, mended, _submission = said["outputs"]
    assert first == {"code": 0, "output": f"{spec.workdir}\n"}
    assert slow == {"code": -1, "output": "timeout (5 s) exceeded while running command 'sleep 60'"}
    assert mended["code"] == 0
