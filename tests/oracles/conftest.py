"""Other projects' own code as the reference for the farm's parsing: `make test-oracles`.

Without FARM_TEST_ORACLES, the folder of their environments, none of these tests is collected. The oracles' results are
recorded in `tests/data/oracles`, and `make test` compares the farm with them.
"""

from __future__ import annotations

import os

if not os.environ.get("FARM_TEST_ORACLES"):
    collect_ignore_glob = ["test_*.py"]
