"""Schemathesis checks the served API against its description: no 5xx, nothing that the description does not allow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.store.database import Store
from tests.services.api import KEY, served
from tests.services.farms import NOOP
from tests.services.soak import repeats

N_EXAMPLES = repeats(5, 200)

# The description cannot express that one part of a request depends on another, on the installed plug-ins, or on earlier
# requests, or that free JSON is text without NUL and integers of 64 bits: such requests are refused, although each of
# their parts matches the description.
_DEPENDENT = ("/v1/annotations", "/v1/archives", "/v1/batches", "/v1/sandboxes", "/v1/steps")
_CONFIG = """
[auth.openapi]
header = {{ api_key = "{key}" }}

[[operations]]
include-path-regex = "^({paths})"
checks.positive_data_acceptance.enabled = false
"""


@pytest.mark.soak
def test_served_api_matches_its_description(sqlite_store: Store, tmp_path: Path) -> None:
    service = LocalFarm(sqlite_store, Signals(""), 10_000)
    service.submit({"instances": [NOOP], "n_samples": 2})
    config = tmp_path / "schemathesis.toml"
    config.write_text(_CONFIG.format(key=KEY, paths="|".join(_DEPENDENT)))
    with served(service) as url:
        command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(config), "run"]
        # a stream has no end, and is tested separately
        options = ["--exclude-path-regex", "/events$", "--phases", "coverage,fuzzing"]
        options += ["--header", f"X-API-Key: {KEY}", "--max-examples", str(N_EXAMPLES), "--seed", "1", "--no-color"]
        ran = subprocess.run(
            [*command, f"{url}/openapi.json", *options], cwd=tmp_path, capture_output=True, text=True, timeout=3600
        )
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2000:]
    assert " generated, " in ran.stdout, ran.stdout
    assert "Authentication failed" not in ran.stdout, "it showed no key"
