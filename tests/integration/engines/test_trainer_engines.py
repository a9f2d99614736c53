"""Engines that a trainer owns, behind a bridge or with their own addresses, only for the batches of its run."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import pytest

import farm
from farm.adapters.engine_bridge import GENERATE, EngineBridge, OwnEngines, SampledByTrainer
from farm.adapters.trainer_step import Phase, TrainerRun, TrainerServer, remove_silent_servers, router_servers
from farm.embedded.embedded_farm import Embedded
from farm.errors import FarmError
from farm.records.request import Instance
from farm.records.rollout import Stage, State
from tests.doubles import EngineDouble
from tests.services.farms import embedded, farm_folder, until
from workers.testing.engine.simulated_values import ExpertRouting
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

QUESTION = "How many hops?"
ROUTING = ExpertRouting()
CHAT = Instance(data_source="chat", fields={"question": QUESTION, "expected": "three"})
NOOP = Instance(data_source="noop", fields={})


def answers(text: str) -> Script:
    return Script(
        [ScriptedProblem(match=QUESTION, branches=(Branch(name="only", turns=(ScriptedTurn(content=text),)),))]
    )


@dataclass
class TrainerEngineClient:
    """The engine in a trainer's process: a client of a scripted server, like trainers' clients of vLLM and SGLang.

    While `hold` is cleared, no call begins.
    """

    url: str
    model: str
    version: str = "3"
    hold: threading.Event = field(default_factory=threading.Event)
    sampled: list[dict[str, Any]] = field(default_factory=list)
    n_cancelled: int = 0

    def __post_init__(self) -> None:
        self.hold.set()

    async def generate(self, prompt_ids: list[int], sampling: dict[str, Any], session: str) -> SampledByTrainer:
        try:
            while not self.hold.is_set():  # noqa: ASYNC110 - it is cleared in another thread
                await asyncio.sleep(0.01)
            params = {name: value for name, value in sampling.items() if name != "cache_salt"}
            body = {"model": self.model, "token_ids": prompt_ids, "sampling_params": params, "return_token_ids": True}
            async with httpx2.AsyncClient(trust_env=False) as http:
                answer = (await http.post(f"{self.url}{GENERATE}", json=body)).raise_for_status().json()
        except asyncio.CancelledError:
            self.n_cancelled += 1
            raise
        self.sampled.append({"prompt_ids": prompt_ids, "session": session, **sampling})
        (choice,) = answer["choices"]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        experts = choice.get("routed_experts")
        return SampledByTrainer(
            choice["token_ids"],
            logprobs,
            choice["finish_reason"],
            self.version,
            routed_experts=None if experts is None else np.load(io.BytesIO(base64.b64decode(experts))),
        )


@dataclass(slots=True)
class _Servers:
    """The farm's own engine, whose answers are wrong, and the trainer's, whose answers are right."""

    shared: EngineDouble
    shared_url: str
    trainer: EngineDouble
    trainer_url: str
    model: str
    tokenizer: str


@pytest.fixture(scope="module")
def servers() -> Iterator[_Servers]:
    shared, trainer = EngineDouble(answers("four"), weight_version="0"), EngineDouble(answers("three"), experts=ROUTING)
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(each.app())) for each in (shared, trainer)]
        card = httpx2.get(f"{urls[1]}/v1/models", trust_env=False).json()["data"][0]
        yield _Servers(shared, urls[0], trainer, urls[1], card["id"], card["root"])


@pytest.fixture(scope="module")
def here(servers: _Servers) -> Iterator[Embedded]:
    with (
        farm_folder() as folder,
        embedded(folder, FARM_POLICY_URL=f"{servers.shared_url}/v1", FARM_RETRY_S="0.05") as started,
    ):
        yield started


@pytest.fixture(scope="module")
def client(here: Embedded) -> Iterator[farm.Farm]:
    with farm.connect(here.store_url, broker_url=here.broker_url) as connected:
        yield connected


@contextmanager
def own_engines(client: farm.Farm, servers: _Servers, name: str) -> Iterator[tuple[TrainerRun, OwnEngines]]:
    """Yield a training run whose trainer has an engine without an address."""
    run = TrainerRun(client, name, {"limits": {"max_tokens": 64}}, timeout_s=60)
    engines = OwnEngines(run)
    engine = TrainerEngineClient(servers.trainer_url, servers.model)
    engines.bridge = EngineBridge(engine.generate, servers.tokenizer, context_tokens=4096, host="127.0.0.1")
    engines.engine = engine  # type: ignore[attr-defined]
    try:
        yield run, engines
    finally:
        engines.close()


def engines_used(client: farm.Farm, rollouts: Sequence[farm.Rollout]) -> set[str]:
    return {call.engine for rollout in rollouts for call in client.calls(rollout.rollout_id)}


def engine_urls(client: farm.Farm, run: TrainerRun) -> list[str]:
    return [state.engine.url for state in client.engines() if state.engine.model == run.model]


def test_run_uses_only_the_engine_of_its_trainer(client: farm.Farm, servers: _Servers) -> None:
    with own_engines(client, servers, "own") as (run, engines):
        with engines.admitted():
            rollouts = run.run_samples([CHAT] * 4, 1)
            # batches that name no model are run while the trainer's engine exists
            others = client.collect(client.submit({"instances": [CHAT], "n_samples": 8}), timeout_s=600)
        assert [each.reward for each in rollouts] == [1.0] * 4
        assert engines.bridge is not None
        assert engines_used(client, rollouts) == {engines.bridge.server.url}
        assert [each.reward for each in others] == [0.0] * 8
        assert engines_used(client, others) == {f"{servers.shared_url}/v1"}
        # trained tokens are those that the trainer's engine sampled, under the version that it named
        sampled = engines.engine.sampled  # type: ignore[attr-defined]
        (segment,) = rollouts[0].segments
        assert segment.trainable
        assert {tuple(segment.prompt_ids)} == {tuple(each["prompt_ids"]) for each in sampled if each["session"]}
        assert (segment.response_logprobs[segment.response_mask == 1] < 0).all()
        assert {each.version_min for each in rollouts} == {3}
        (state,) = [each for each in client.engines() if each.engine.model == run.model]
        assert state.engine.info is not None
        assert (state.engine.info.kind, state.engine.info.token_in, state.engine.info.notes) == (
            "bridge",
            "generate",
            (),
        )
    assert engine_urls(client, run) == [], "removed as the trainer ends"


def test_calls_wait_while_the_trainer_admits_none(client: farm.Farm, servers: _Servers) -> None:
    with own_engines(client, servers, "asleep") as (run, engines):
        with engines.admitted():
            run.run_samples([CHAT], 1)
        engine: TrainerEngineClient = engines.engine  # type: ignore[attr-defined]
        n_before = len(engine.sampled)
        batch_id, _ = run.submit([CHAT] * 2, 2)
        until(
            lambda: client.status(batch_id).stages.get(Stage.RUN, {}).get(State.ACTIVE) == 2 or None,
            "the rollouts run",
        )
        assert len(engine.sampled) == n_before, "an engine that may be asleep is not called"
        with engines.admitted():
            assert [each.reward for each in client.collect(batch_id, timeout_s=600)] == [1.0] * 2
        assert all(each.attempt == 1 for each in client.rollouts(batch_id))


def test_restarted_trainer_continues_its_step(client: farm.Farm, servers: _Servers) -> None:
    run, engines = None, None
    with ExitStack() as stack:
        run, engines = stack.enter_context(own_engines(client, servers, "killed"))
        assert engines.bridge is not None
        with engines.admitted():
            # one sample is complete, the others wait for the trainer's engine
            first, _ = run.submit([CHAT] * 6, 7)
            engine: TrainerEngineClient = engines.engine  # type: ignore[attr-defined]
            until(lambda: client.status(first).n_finished >= 1 or None, "one has ended")
            engine.hold.clear()
        old = engines.bridge.server.url
        # killed: nothing is removed
        engines.bridge.close()
        again, afresh = stack.enter_context(own_engines(client, servers, "killed"))
        with afresh.admitted():
            rollouts = again.run_samples([CHAT] * 6, 7)
        assert {each.batch_id for each in rollouts} == {first}
        assert [each.reward for each in rollouts] == [1.0] * 6
        assert [each.attempt for each in rollouts] == [1] * 6
        assert afresh.bridge is not None
        assert engine_urls(client, run) == [afresh.bridge.server.url] != [old]
        engines.engine.hold.set()  # type: ignore[attr-defined]


def test_trainer_that_ended_during_a_step_continues_it(client: farm.Farm, servers: _Servers) -> None:
    """Its engines are removed at its end; its rollouts wait for the engines of the next, and no attempt fails."""
    with own_engines(client, servers, "ended") as (run, engines), engines.admitted():
        engines.engine.hold.clear()  # type: ignore[attr-defined]
        batch_id, _ = run.submit([CHAT] * 3, 1)
        until(lambda: client.status(batch_id).stages.get(Stage.RUN, {}).get(State.ACTIVE) == 3 or None, "they run")
        engines.close()
        engines.engine.hold.set()  # type: ignore[attr-defined]
    assert engine_urls(client, run) == []
    time.sleep(1.0)
    (warning,) = client.status(batch_id).warnings
    assert warning.startswith("the training run ended has no engine")
    with own_engines(client, servers, "ended") as (again, afresh), afresh.admitted():
        rollouts = again.run_samples([CHAT] * 3, 1)
    assert {each.batch_id for each in rollouts} == {batch_id}
    assert [(each.reward, each.attempt) for each in rollouts] == [(1.0, 1)] * 3


def test_pause_and_version_orders_exclude_engines_of_trainers(client: farm.Farm, servers: _Servers) -> None:
    with own_engines(client, servers, "orders") as (run, engines), engines.admitted():
        run.run_samples([CHAT], 1)
        with client.weight_update(11, timeout_s=60) as updated:
            assert [each.url for each in updated] == [f"{servers.shared_url}/v1"]
            (during,) = run.run_samples([CHAT], 2, max_staleness=0)
        assert client.newest_version() == "11"
        (after,) = run.run_samples([CHAT], 3, max_staleness=0)
        assert [(each.reward, each.version_min, each.attempt) for each in (during, after)] == [(1.0, 3, 1)] * 2
        (state,) = [each for each in client.engines() if each.engine.model == run.model]
        assert (state.engine.version, state.engine.paused, state.engine.status) == ("", "", "ready")


def test_servers_of_a_trainer_are_registered_and_removed(client: farm.Farm, servers: _Servers) -> None:
    """As slime's router lists them: servers that it no longer lists are removed."""
    run = TrainerRun(client, "router", timeout_s=60)
    gone = TrainerServer("http://127.0.0.1:9/v1", tokenizer=servers.tokenizer)
    here = TrainerServer(f"{servers.trainer_url}/v1", tokenizer=servers.tokenizer)
    run.use_servers([gone, here])
    assert sorted(engine_urls(client, run)) == sorted([gone.url, here.url])
    assert [each.reward for each in run.run_samples([CHAT] * 4, 1)] == [1.0] * 4
    run.use_servers([here])
    run.use_servers([here])
    assert engine_urls(client, run) == [here.url]
    assert run.settings["model"] == run.model
    run.remove_servers()
    assert engine_urls(client, run) == []


def test_stopped_servers_of_ended_trainers_are_removed(client: farm.Farm) -> None:
    gone = TrainerRun(client, "actors-1")
    gone.use_servers([TrainerServer("http://127.0.0.1:9/v1")])
    other = TrainerRun(client, "others-1")
    other.use_servers([TrainerServer("http://127.0.0.1:7/v1")])
    until(lambda: all(each.engine.failure for each in client.engines()[1:]) or None, "both are found to be out")
    remove_silent_servers(client, "actors-")
    assert (engine_urls(client, gone), engine_urls(client, other)) == ([], ["http://127.0.0.1:7/v1"])
    other.remove_servers()


def test_settings_with_a_model_or_engine_url_name_engines(client: farm.Farm) -> None:
    assert TrainerRun(client, "r", {"model": "m"}).names_engines
    assert TrainerRun(client, "r", {"engine_url": "http://h:1/v1"}).names_engines
    assert not TrainerRun(client, "r", {"limits": {}}).names_engines


def test_routed_experts_of_the_trainer_engine_are_in_its_rows(client: farm.Farm, servers: _Servers) -> None:
    with own_engines(client, servers, "experts") as (run, engines), engines.admitted():
        rollouts = run.run_samples([CHAT] * 2, 1, sampling={"routed_experts": ROUTING.top_k})
        for rollout in rollouts:
            (row,) = rollout.segments
            assert row.routed_experts is not None
            ids = np.concatenate([row.prompt_ids, row.response_ids])
            assert row.routed_experts.known[:-1].all()
            assert (row.routed_experts.ids[:-1] == ROUTING.of(ids, "default")[:-1]).all()


def test_seed_differs_between_steps_and_not_between_evaluations(client: farm.Farm) -> None:
    run = TrainerRun(client, "seeds", {"sampling": {"seed": 7}}, timeout_s=60)

    def seeds(step: int, phase: Phase) -> list[int | None]:
        rollouts = run.run_samples([CHAT] * 2, step, phase)
        return [client.calls(each.rollout_id)[0].sampling["seed"] for each in rollouts]

    trained = [seeds(step, "train") for step in (1, 2, 3)]
    assert len({seed for step in trained for seed in step}) == 6
    assert seeds(2, "train") == trained[1], "the same step, the same draw"
    assert seeds(1, "eval") == seeds(2, "eval")


class TestBridge:
    """The answers of the bridge to plain HTTP requests."""

    @pytest.fixture
    def engine(self, servers: _Servers) -> TrainerEngineClient:
        return TrainerEngineClient(servers.trainer_url, servers.model)

    @pytest.fixture
    def bridge(self, engine: TrainerEngineClient) -> Iterator[EngineBridge]:
        bridge = EngineBridge(engine.generate, host="127.0.0.1")
        bridge.start()
        bridge.start()
        try:
            yield bridge
        finally:
            bridge.close()

    @staticmethod
    def post(bridge: EngineBridge, body: Any, timeout: float = 30.0, **headers: str) -> httpx2.Response:
        url = bridge.server.url.removesuffix("/v1") + GENERATE
        given = {"authorization": f"Bearer {bridge.server.key}"} | headers
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.post(url, content=content, headers=given, timeout=timeout, trust_env=False)

    ASK: dict[str, Any] = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1, "logprobs": 0}}  # noqa: RUF012

    def test_bridge_requires_its_key(self, bridge: EngineBridge) -> None:
        with bridge.admitted():
            for wrong in ("", "Bearer", "Bearer x", f"Basic {bridge.server.key}"):
                assert self.post(bridge, self.ASK, authorization=wrong).status_code == 401
            assert self.post(bridge, self.ASK).status_code == 200
        assert bridge.server.key not in repr(bridge)
        assert bridge.server.key not in repr(bridge.server)

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"null", b"{}", {"token_ids": "x", "sampling_params": {}}, {"token_ids": [1]}, b"\xff"],
    )
    def test_invalid_request_is_refused(self, bridge: EngineBridge, body: Any) -> None:
        with bridge.admitted():
            answer = self.post(bridge, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]

    def test_stream_is_one_event(self, bridge: EngineBridge) -> None:
        with bridge.admitted():
            answer = self.post(bridge, self.ASK | {"stream": True})
        first, last = answer.text.strip().split("\n\n")
        assert answer.headers["content-type"] == "text/event-stream"
        assert last == "data: [DONE]"
        assert len(json.loads(first.removeprefix("data: "))["choices"][0]["token_ids"]) == 1

    def test_call_of_a_disconnected_client_is_cancelled(
        self, bridge: EngineBridge, engine: TrainerEngineClient
    ) -> None:
        engine.hold.clear()
        with bridge.admitted(), pytest.raises(httpx2.TimeoutException):
            self.post(bridge, self.ASK, timeout=0.3)
        until(lambda: engine.n_cancelled or None, "the engine's call is cancelled", 10)

    @pytest.mark.parametrize(
        ("sampled", "status", "words"),
        [
            (SampledByTrainer([1, 2], [-0.5], "stop"), 500, "2 tokens, with 1 log-probabilities"),
            (ValueError("the prompt is too long"), 400, "the prompt is too long"),
            (TypeError("no such parameter"), 400, "no such parameter"),
            (RuntimeError("the actor died"), 500, "the actor died"),
        ],
    )
    def test_error_of_the_engine_is_returned(self, sampled: Any, status: int, words: str) -> None:
        async def generate(*args: Any) -> SampledByTrainer:
            if isinstance(sampled, Exception):
                raise sampled
            result: SampledByTrainer = sampled
            return result

        bridge = EngineBridge(generate, host="127.0.0.1")
        bridge.start()
        try:
            with bridge.admitted():
                answer = self.post(bridge, self.ASK)
        finally:
            bridge.close()
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True)

    def test_calls_run_on_the_event_loop_of_the_trainer(self) -> None:
        async def trained() -> None:
            own = asyncio.get_running_loop()
            loops = []

            async def generate(*args: Any) -> SampledByTrainer:
                loops.append(asyncio.get_running_loop())
                return SampledByTrainer([5], [-1.0], "stop")

            bridge = EngineBridge(generate, host="127.0.0.1", loop=own)
            await asyncio.to_thread(bridge.start)
            try:
                with bridge.admitted():
                    answer = await asyncio.to_thread(self.post, bridge, self.ASK)
            finally:
                await asyncio.to_thread(bridge.close)
            assert answer.json()["choices"][0]["token_ids"] == [5]
            assert loops == [own]

        asyncio.run(trained())


@pytest.mark.parametrize(
    ("listing", "urls"),
    [
        ([{"url": "http://a:1"}, {"url": "http://b:2/", "worker_type": "regular"}], ["http://a:1/v1", "http://b:2/v1"]),
        ([{"url": "http://a:1", "worker_type": "prefill"}, {"url": "http://b:2", "worker_type": "decode"}], None),
    ],
)
def test_servers_of_a_router_are_listed(listing: list[dict[str, str]], urls: list[str] | None) -> None:
    with router({"workers": listing}) as (host, port):
        found = router_servers(host, port, "model")
    assert [each.url for each in found] == (urls or [f"http://{host}:{port}/v1"])
    assert {each.tokenizer for each in found} == {"model"}


@pytest.mark.parametrize("answer", [{"workers": []}, {}, [], {"workers": [{}]}, {"workers": None}])
def test_router_without_servers_is_one_error(answer: Any) -> None:
    with router(answer) as (host, port), pytest.raises(FarmError, match=rf"router http://{host}:{port} "):
        router_servers(host, port, "model")


@contextmanager
def router(answer: Any) -> Iterator[tuple[str, int]]:
    """Run a router that lists its workers as SGLang's does."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def workers(request: Any) -> JSONResponse:
        return JSONResponse(answer)

    with serving(Starlette(routes=[Route("/workers", workers)])) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)
