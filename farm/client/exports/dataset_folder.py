"""Export to a folder that `datasets.load_dataset` reads: Parquet files of bounded size and a dataset card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farm.client.exports.parquet_writer import ParquetWriter

_SHARD_BYTES = 256_000_000

_CARD = """---
configs:
- config_name: default
  data_files: data/*.parquet
---

{n} rollouts of a rollout farm. A row is a rollout: `messages` is the conversation; `segments` are its training
rows (prompt and response ids, mask, log-probabilities, versions of the weights); `reward` is the score that counts,
`scores` all of them as JSON.
"""


def write_dataset(folder: Path, rollouts: Iterator[dict[str, Any]]) -> int:
    """Fill an empty folder. Returns the number of rollouts."""
    data = folder / "data"
    data.mkdir()
    n, shard, left = 0, 0, True
    while left:
        path = data / f"rollouts-{shard:05d}.parquet"
        with path.open("wb") as file, ParquetWriter(file) as writer:
            left = False
            for each in rollouts:
                writer.write(each)
                if file.tell() > _SHARD_BYTES:
                    left = True
                    break
        n += writer.n_rows
        if not writer.n_rows and shard:
            path.unlink()
        shard += 1
    (folder / "README.md").write_text(_CARD.format(n=n))
    return n
