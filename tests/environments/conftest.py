"""The packages of environments themselves: `make test-environments`.

None of the tests is collected without FARM_TEST_ENVIRONMENTS.
"""

from __future__ import annotations

import os

if not os.environ.get("FARM_TEST_ENVIRONMENTS"):
    collect_ignore_glob = ["test_*.py"]
