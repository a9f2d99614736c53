"""Loads a folder that `farm export` wrote, as a user of `datasets` would, and prints its contents."""

from __future__ import annotations

import json
import sys

from datasets import load_dataset

rows = load_dataset(sys.argv[2], split="train", cache_dir=sys.argv[3])
first = rows[0]
segment = first["segments"][0]
# To the end, as Arrow's read-ahead thread would abort a process that exits during a stream.
streamed = [*load_dataset(sys.argv[2], split="train", streaming=True)]
facts = {
    "n": len(rows),
    "rewards": rows["reward"][:],
    "roles": [each["role"] for each in first["messages"]],
    "lengths": [len(segment[name]) for name in ("response_ids", "response_mask", "response_logprobs")],
    "streams": [each["rollout_id"] for each in streamed] == rows["rollout_id"][:],
}
print(json.dumps(facts))
