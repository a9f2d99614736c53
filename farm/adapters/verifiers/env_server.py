"""verifiers and prime-rl: their env server (`verifiers.v1.serve`) with the farm in the place of an environment.

The receive loop is verifiers' own, by inheritance; each client is answered in the wire format of its version
(`client_wires`), whichever of the two is installed here. A `run` becomes a rollout of the farm on the trainer's
endpoint in the request; the reply is an episode with one trace. A failed rollout is an episode with its error, which
verifiers' consumers drop.

`python -m farm.adapters.verifiers` serves it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgpack  # type: ignore[import-not-found, unused-ignore]
import zmq
import zmq.asyncio
from verifiers.v1.configs import client as client_configs  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.configs.client import (  # type: ignore[import-not-found, unused-ignore]
    TrainClientConfig,
    resolve_api_key,
)
from verifiers.v1.episode import EnvInfo, WireEpisode  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.serve.encoding import msgpack_encoder  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.serve.server import EnvServer  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.serve.types import RunRequest  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.task import TaskData  # type: ignore[import-not-found, unused-ignore]

from farm.adapters.trainer_sampling import TrainerSampling
from farm.adapters.verifiers.client_wires import ClientWires, plain_request, reply
from farm.adapters.verifiers.traces import RecordedRollout, trace_of, trace_task
from farm.client.gathered_rollouts import GatheredRollouts
from farm.errors import FarmError, InvalidRequest
from farm.records.request import BatchRequest, EngineSettings, Instance, SamplingParams
from farm.records.rollout import Rollout

log = logging.getLogger(__name__)

InstanceOf = Callable[[dict[str, Any]], Instance]

_N_THREADS = 16
_LIMITS = {"setup": "init_s", "agent": "run_s", "scoring": "eval_s"}
"""The farm's limit for each of a task's timeouts."""
_OF_CALLER = frozenset({"idx", "id", "name", "description", "timeout"})
"""Fields of a task that do not affect how it runs, or are mapped."""
_LATER: Mapping[str, Any] = {"agent_user": None, "skills": []}
"""Fields of a task in 0.4.0 that a60a606 lacks, with their defaults."""


def run_of(payload: Mapping[str, Any]) -> RunRequest:
    """Return the run in a request's payload, from a client of either version. Raises ValidationError."""
    return RunRequest.model_validate(plain_request(payload))


def _pack(payload: Any) -> bytes:
    packed: bytes = msgpack.packb(payload, default=msgpack_encoder, use_bin_type=True)
    return packed


def instance_of(task_data: dict[str, Any]) -> Instance:
    """Return the instance of a task with `data_source` and `fields`, like `farm.Instance`.

    Raises InvalidRequest if one is missing, or if another field changes how the task is to run.
    """
    defaults = {**_LATER, **TaskData().model_dump(mode="json")}
    for name in sorted((defaults.keys() & task_data.keys()) - _OF_CALLER):
        if task_data[name] != defaults[name]:
            raise InvalidRequest("the farm's handler decides that: leave it out, or give --instance", field=name)
    if missing := {"data_source", "fields"} - task_data.keys():
        raise InvalidRequest("is missing: a task needs data_source and fields, or give --instance", field=min(missing))
    return Instance(data_source=task_data["data_source"], fields=task_data["fields"])


def engine_of(run: RunRequest) -> dict[str, Any]:
    """Return the settings of the engine named by a request. Raises InvalidRequest for unsupported headers.

    A training client's endpoint takes and returns token ids; any other is a plain chat server.
    """
    # a60a606 has all of them in the client's configuration
    resolve_headers = getattr(client_configs, "resolve_headers", lambda client: client.headers)
    if headers := resolve_headers(run.client):
        raise InvalidRequest(f"the farm sends no other headers ({', '.join(sorted(headers))})", field="client.headers")
    key = resolve_api_key(run.client)
    trains = isinstance(run.client, TrainClientConfig)
    return {
        "engine_url": run.client.base_url,
        "engine_key": "" if key == "EMPTY" else key,
        "engine_model": run.model,
        "engine_tokenizer": (run.client.renderer_model_name or "") if trains else "",
        "engine_route": "detect" if trains else "chat",
    }


def sampling_of(run: RunRequest, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a batch for a request's sampling. Raises InvalidRequest for unsupported parameters."""
    requested = {name: value for name, value in run.sampling.model_dump().items() if value is not None}
    template = requested.pop("chat_template_kwargs", {})
    # the engine chooses what a request leaves out
    sampling = {"temperature": None} | TrainerSampling("sampling", ignored, "--ignore leaves it out").fields(requested)
    return {"sampling": sampling, "chat_template_kwargs": template}


class FarmEnvServer(EnvServer):  # type: ignore[misc, unused-ignore]
    """verifiers' env server on a farm. `request` has further fields of the batches made of its rollouts.

    `routed_experts` is the number of experts per token and layer, for a trainer that replays routing: then rollouts of
    a training client record them.
    """

    def __init__(
        self,
        rollouts: GatheredRollouts,
        address: str,
        *,
        instance: InstanceOf = instance_of,
        request: Mapping[str, Any] | None = None,
        ignored: Collection[str] = (),
        routed_experts: int | None = None,
    ) -> None:
        # not EnvServer's, which would load an environment
        self.taskset_id = "farm"
        self.env = self
        self._gate = None
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._wires = ClientWires()
        self._rollouts = rollouts
        self._instance = instance
        self._request = dict(request or {})
        self._ignored = ignored
        self._routed_experts = SamplingParams(routed_experts=routed_experts).routed_experts
        self._threads = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="farm")
        fixed = {"instances", "n_samples", "sampling", "idempotency_key", *EngineSettings.model_fields}
        if fixed & self._request.keys():
            raise InvalidRequest("each request sets it", field=min(fixed & self._request.keys()))
        if known := SamplingParams.model_fields.keys() & set(ignored):
            raise InvalidRequest("the farm sends it on, and samples would differ without it", field=min(known))
        BatchRequest.model_validate({"instances": [{"data_source": "none", "fields": {}}]} | self._request)
        self.ctx = zmq.asyncio.Context()
        self.frontend = self.ctx.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self.frontend.setsockopt(option, 0)
        self.frontend.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.frontend.bind(address)
        self.address = self.frontend.getsockopt_string(zmq.LAST_ENDPOINT)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep verifiers' resources for all requests open; the farm has its own."""
        yield

    async def _handle(self, client_id: bytes, request_id: bytes, method: bytes, payload: bytes) -> None:
        """Answer one request in its client's wire; the reply to a failed one has an error."""
        wire = self._wires.of(client_id)
        try:
            raw = msgpack.unpackb(payload, raw=False)
            if method == b"health":
                wire = self._wires.of_probe(client_id, time.monotonic())
                messages = [("reply", reply())]
            elif method == b"run":
                wire = self._wires.of_run(client_id, raw)
                try:
                    messages = wire.messages(await self._run(run_of(raw)))
                finally:
                    self._running.pop(request_id.decode(), None)
            elif method == b"cancel":
                running = self._running.get(str(raw["request_id"]))
                if running is not None:
                    running.cancel()
                messages = [("reply", reply(cancelled=running is not None))]
            else:
                messages = [("reply", reply(f"unknown method {method.decode()!r}"))]
            packed = [(kind, _pack(body)) for kind, body in messages]
        except asyncio.CancelledError:
            packed = [("reply", _pack(reply("Cancelled: rollout aborted")))]
        except Exception as error:
            log.warning("Request failed: %s", error, exc_info=not isinstance(error, FarmError))
            packed = [("reply", _pack(reply(f"{type(error).__name__}: {error}")))]
        try:
            for kind, body in packed:
                await self.frontend.send_multipart([client_id, request_id, *wire.frames(kind, body)], copy=False)
        except zmq.ZMQError as error:
            log.warning("Answer not sent: its client has disconnected (%s)", error)

    async def _run(self, req: RunRequest) -> dict[str, Any]:
        """Run one rollout, and return its dumped episode. Raises InvalidRequest for unsupported requests."""
        request = self._request | sampling_of(req, self._ignored)
        if self._routed_experts is not None and isinstance(req.client, TrainClientConfig):
            request["sampling"].setdefault("routed_experts", self._routed_experts)
        request["limits"] = self._limits(req.task_data)
        own = request["chat_template_kwargs"]
        request["chat_template_kwargs"] = {**self._request.get("chat_template_kwargs", {}), **own}
        instance = Instance.model_validate(self._instance(req.task_data).model_dump() | engine_of(req))
        if isinstance(req.client, TrainClientConfig) and req.client.renderer is not None:
            log.info("Prompts are rendered by the model's chat template, not by %s", req.client.renderer)
        started = self._rollouts.start(instance, request)
        try:
            rollout = await asyncio.wrap_future(started.ended)
        except asyncio.CancelledError:
            self._rollouts.abandon(started)
            raise
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._episode, rollout, req)

    def _episode(self, rollout: Rollout, req: RunRequest) -> dict[str, Any]:
        """Return the dumped episode of a rollout, in fields that both versions read."""
        task = trace_task(req.task_data)
        client, name = self._rollouts.client, rollout.rollout_id
        recorded = RecordedRollout(rollout, client.calls(name), client.rewards(name), client.timings(name))
        trace = trace_of(recorded, task, req.model, req.sampling)
        episode = WireEpisode(env=EnvInfo(id="farm"), task=task, ok=trace.ok, traces=[trace])
        dumped: dict[str, Any] = episode.model_dump(mode="python", serialize_as_any=True)
        # a version refuses unknown fields of an agent, and has its own fields of a task
        dumped["traces"][0]["agent"]["config"] = {"model": req.model, "sampling": req.sampling.model_dump()}
        for each in (dumped, *dumped["traces"]):
            each["task"]["data"] = req.task_data
        return dumped

    def _limits(self, task_data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the limits of a task: the server's, overridden by the task's own timeouts."""
        timeouts = task_data.get("timeout") or {}
        unknown = {name for name, value in timeouts.items() if value is not None} - _LIMITS.keys()
        if unknown:
            raise InvalidRequest("the farm has no such limit", field=f"timeout.{min(unknown)}")
        own = {_LIMITS[name]: value for name, value in timeouts.items() if value is not None}
        return {**self._request.get("limits", {}), **own}
