"""Programs of these tests that run in the trainers' environment: they get JSON, and give JSON back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.services.api import KEY

ROOT = Path(__file__).parents[2]
_LIMIT_S = 600


def result_of(program: str, **given: Any) -> dict[str, Any]:
    """Run `tests/trainers/<program>.py` with the trainers' Python, and return what it printed last."""
    python = os.environ["FARM_TRAINERS_PYTHON"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "FARM_API_KEY": KEY, "FARM_HOME": given.pop("home")}
    done = subprocess.run(
        [python, str(Path(__file__).parent / f"{program}.py")],
        input=json.dumps(given),
        env=env,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {"log": done.stderr}
