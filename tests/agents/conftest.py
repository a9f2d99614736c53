"""The programs of the presets themselves: `make test-agents`.

None of the tests is collected without FARM_TEST_AGENTS.
"""

from __future__ import annotations

import os

if not os.environ.get("FARM_TEST_AGENTS"):
    collect_ignore_glob = ["test_*.py"]
