"""Export to Parquet: one row per rollout with messages, training rows and scores, written in row groups.

A data set is a folder of files of bounded size, with a card, that `datasets.load_dataset` reads.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Self

from farm.errors import NotInstalled

_GROUP_BYTES = 16_000_000
"""Approximate bytes of tokens and texts per row group, which are held in memory."""
_MESSAGE = ("role", "content", "parts", "reasoning_content", "tool_calls", "tool_call_id", "name")
_ARRAYS = {
    **{"prompt_ids": "int32", "response_ids": "int32", "response_mask": "uint8"},
    **{"response_logprobs": "float32", "policy_versions": "int32"},
}

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


class ParquetWriter:
    """Writes rollouts into a file, which may be a stream; complete after the block. Raises NotInstalled."""

    def __init__(self, file: IO[bytes]) -> None:
        if find_spec("pyarrow") is None:
            raise NotInstalled("Parquet needs pyarrow, which is not installed here: pip install 'rollout-farm[rows]'")
        # imported here: slow to load, and only needed for Parquet
        import pyarrow
        from pyarrow import parquet

        self._schema = _schema()
        self._tables = pyarrow.Table
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._n_bytes = 0
        self.n_rows = 0

    def write(self, values: dict[str, Any]) -> None:
        """Add a rollout in the form of `rollout_values`."""
        row = _row(values)
        self._rows.append(row)
        self.n_rows += 1
        # as Python objects, numbers take more than twice their size
        texts = sum(len(text) for each in row["messages"] for text in each.values() if text)
        self._n_bytes += texts + sum(16 * array.size for each in row["segments"] for array in _arrays(each))
        if self._n_bytes > _GROUP_BYTES:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # an unclosed writer complains when it is garbage-collected
        try:
            if kind is None:
                self._flush()
        finally:
            self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._tables.from_pylist(self._rows, self._schema))
        self._rows, self._n_bytes = [], 0


def _arrays(segment: dict[str, Any]) -> list[Any]:
    return [segment[name] for name in _ARRAYS]


class Drained(io.RawIOBase):
    """A writable file that keeps its data until `take`."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._n = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        self._n += len(self._parts[-1])
        return len(self._parts[-1])

    def tell(self) -> int:
        return self._n

    def take(self) -> bytes:
        """Return the data written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


def parquet_parts(rollouts: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """Yield a Parquet file in parts as it is written; parts may be empty."""
    file = Drained()
    with ParquetWriter(file) as writer:  # type: ignore[arg-type]
        for each in rollouts:
            writer.write(each)
            yield file.take()
    yield file.take()


def _schema() -> Any:
    import pyarrow as pa

    text, number, real = pa.string(), pa.int64(), pa.float64()
    message = pa.struct([(name, text) for name in _MESSAGE])
    arrays = [(name, pa.list_(getattr(pa, kind)())) for name, kind in _ARRAYS.items()]
    turn = pa.struct([("index", number), ("reward", real)])
    figure = pa.struct(
        [
            *(("name", text), ("producer", text), ("step", number), ("value", real), ("row", number)),
            *(("tokens", pa.list_(pa.float32())), ("created_at", real)),
        ]
    )
    more = [("turn_rewards", pa.list_(turn)), ("images", pa.list_(text)), ("reward", real), ("trainable", pa.bool_())]
    segment = pa.struct([*arrays, *more])
    return pa.schema(
        [
            *((name, text) for name in ("rollout_id", "group_id", "data_source", "instance_id", "state", "outcome")),
            *(("reward", real), ("trainable", pa.bool_()), ("failure_kind", text), ("failure_message", text)),
            *((name, number) for name in ("attempt", "n_turns", "n_response_tokens", "version_min", "version_max")),
            *(("submitted_at", real), ("finished_at", real)),
            *(("messages", pa.list_(message)), ("segments", pa.list_(segment)), ("tools", text), ("scores", text)),
            ("annotations", pa.list_(figure)),
        ]
    )


def _row(values: dict[str, Any]) -> dict[str, Any]:
    failure = values["failure"] or {"kind": None, "message": None}
    least, most = values["versions"]
    more = {
        "failure_kind": failure["kind"],
        "failure_message": failure["message"],
        "version_min": least,
        "version_max": most,
        "messages": [_message(each) for each in values["messages"]],
        "segments": [_segment(each) for each in values["segments"]],
        "tools": _json(values["tools"]),
        "scores": _json(values["rewards"]),
    }
    return {name: str(each) if name in ("state", "outcome") and each else each for name, each in values.items()} | more


def _segment(segment: dict[str, Any]) -> dict[str, Any]:
    pairs = [{"index": index, "reward": reward} for index, reward in segment["turn_rewards"]]
    more = {"turn_rewards": pairs, "images": list(segment["images"])}
    return {name: segment[name] for name in (*_ARRAYS, "reward", "trainable")} | more


def _message(message: dict[str, Any]) -> dict[str, str | None]:
    """Return a message as texts: `content` has its texts, `parts` the JSON of a content that is not a string."""
    content = message.get("content")
    values = {name: _text(message.get(name)) for name in _MESSAGE}
    if content is not None and not isinstance(content, str):
        texts = [each.get("text") for each in content if isinstance(each, dict)] if isinstance(content, list) else []
        values |= {"parts": _json(content), "content": _fit("\n".join(each for each in texts if isinstance(each, str)))}
    return values


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return _fit(value) if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _fit(text: str) -> str:
    """Return a text without unpaired surrogates, which Arrow refuses."""
    return text.encode("utf-8", "replace").decode()


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
