"""Prints the frames that the client of verifiers sends, in hexadecimal: health, a training run, its cancel, an
evaluation run, its cancel. Request ids are counted, so that the frames are the same each time.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from itertools import count
from typing import Any

import zmq
import zmq.asyncio
from verifiers.v1.configs.client import (  # type: ignore[import-not-found, unused-ignore]
    EvalClientConfig,
    TrainClientConfig,
)
from verifiers.v1.serve.client import EnvClient  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.task import TaskData  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.types import SamplingConfig  # type: ignore[import-not-found, unused-ignore]


class FramedTaskData(TaskData):  # type: ignore[misc, unused-ignore]
    """A row of a taskset for the farm."""

    data_source: str
    fields: dict[str, Any]


async def sent() -> list[list[str]]:
    """Return the frames that a server receives."""
    router = zmq.asyncio.Context().socket(zmq.ROUTER)
    client = EnvClient(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    frames = []

    async def take() -> None:
        _, *given = await router.recv_multipart()
        frames.append([frame.hex() for frame in given])

    await asyncio.gather(client.health(0.2), take())
    fields = {"question": "How many hops?", "expected": None}
    data = FramedTaskData(idx=3, data_source="chat", fields=fields).model_dump(mode="json")
    sampling = SamplingConfig(temperature=0.9, max_tokens=64, extra_body={"top_k": 20, "cache_salt": "7"})
    endpoint = {"base_url": "http://127.0.0.1:1/v1", "api_key_var": "TRAINER_KEY"}
    for config in (TrainClientConfig(**endpoint, renderer_model_name="m"), EvalClientConfig(**endpoint)):
        run = asyncio.create_task(client.run(config, "m", sampling, data))
        await take()
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await take()
    await client.close()
    return frames


if __name__ == "__main__":
    numbers = count(1)
    uuid.uuid4 = lambda: uuid.UUID(int=next(numbers))
    print(json.dumps(asyncio.run(sent())))
