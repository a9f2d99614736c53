"""Other projects' own code as the judge of what the farm reads: `make test-oracles`.

Without FARM_TEST_ORACLES, the folder of their environments, none of these tests is collected. What the oracles answer
is recorded in `tests/data/oracles`, and `make test` compares the farm with that.
"""

from __future__ import annotations

import os

if not os.environ.get("FARM_TEST_ORACLES"):
    collect_ignore_glob = ["test_*.py"]
