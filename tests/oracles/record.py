"""Records the oracles' results: `python -m tests.oracles.record DIR`, DIR with their environments."""

from __future__ import annotations

import json
import os
import sys

from tests.oracles.comparisons import COMPARISONS, query_oracle


def main() -> None:
    """Query all oracles, and write a file for each."""
    os.environ["FARM_TEST_ORACLES"] = sys.argv[1]
    for comparison in COMPARISONS:
        comparison.recorded.parent.mkdir(exist_ok=True)
        lines = [
            f"{json.dumps(name)}: {json.dumps(answer, sort_keys=True)}"
            for name, answer in query_oracle(comparison).items()
        ]
        comparison.recorded.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
