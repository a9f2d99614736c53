"""Loads a folder that `farm export` wrote, as a user of `datasets` would, and prints its contents."""

from __future__ import annotations

import json
import sys

from datasets import load_dataset

rows = load_dataset(sys.argv[2], split="train", cache_dir=sys.argv[3])
first = rows[0]
segment = first["segments"][0]
streamed = next(iter(load_dataset(sys.argv[2], split="train", streaming=True)))
facts = {
    "n": len(rows),
    "rewards": rows["reward"][:],
    "roles": [each["role"] for each in first["messages"]],
    "lengths": [len(segment[name]) for name in ("response_ids", "response_mask", "response_logprobs")],
    "streams": streamed["rollout_id"] == first["rollout_id"],
}
print(json.dumps(facts))
