"""OpenRLHF's agent executor on the farm. Needs openrlhf; imported only by its trainer.

    # my_farm.py: --train.agent_func_path my_farm.py
    class AgentExecutor(FarmAgentExecutor):
        connect = staticmethod(farm.connect)
        run = "exp-1"

OpenRLHF calls `execute` once for each sample of a prompt, all at the same moment; they run as one group. It passes no
step number, so a restarted trainer does not resume earlier rollouts. A problem's instance is its label, as JSON
(`--data.label_key`).

OpenRLHF's engines live inside its Ray actors and have no address: each actor's executor serves its own to the farm.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from openrlhf.utils.agent import AgentExecutorBase

from farm.adapters.engine_bridge import EngineBridge, OwnEngines, SampledByTrainer, known_parameters
from farm.adapters.openrlhf import REFUSED, placeholder_fields, response_fields
from farm.adapters.single_row import RewardsSoFar, RowLimits, SampleWindow, StepRow, TooLong, rows_of_step
from farm.adapters.trainer_sampling import TrainerSampling, limits_of
from farm.adapters.trainer_step import TrainerRun, check_count, instance_of, remove_silent_servers
from farm.client.connect import connect as connect_farm
from farm.client.farm import Farm
from farm.errors import InvalidRequest
from farm.records.request import Instance, SamplingParams

_LABEL = "label"
_IMAGES = "data.max_images_per_prompt"
SAMPLING = TrainerSampling("sampling_params")


class FarmAgentExecutor(AgentExecutorBase):  # type: ignore[misc, unused-ignore]
    """Runs OpenRLHF's prompts on a farm. A subclass named `AgentExecutor` sets the attributes.

    It uses OpenRLHF's own engines. With `own_engines` False, or a `model` or an `engine_url` in the settings, it uses
    the farm's.
    """

    connect: ClassVar[Callable[[], Farm]] = staticmethod(connect_farm)
    run: ClassVar[str] = "openrlhf"
    settings: ClassVar[Mapping[str, Any]] = {}
    too_long: ClassVar[TooLong] = "error"
    vocabulary: ClassVar[int | None] = None
    timeout_s: ClassVar[float | None] = None
    own_engines: ClassVar[bool] = True
    bridge_host: ClassVar[str] = ""
    """This machine's address as reachable from the farm's nodes; by default that of its default route."""

    def __init__(self) -> None:
        name = f"{self.run}-{secrets.token_hex(4)}"
        self._trainer_run = TrainerRun(type(self).connect(), name, self.settings, self.timeout_s, takes_experts=False)
        self._window: SampleWindow[_Call, StepRow] = SampleWindow(self._run_calls)
        self._lock = threading.Lock()
        self._n_groups = 0
        self._so_far = RewardsSoFar()
        self._engines = OwnEngines(self._trainer_run, self.bridge_host)

    def instance(self, prompt: str, label: str) -> Instance:
        """Return the instance of a prompt."""
        return instance_of({_LABEL: label}, _LABEL)

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Run one sample of a prompt within its group; return OpenRLHF's response."""
        if images:
            raise InvalidRequest(REFUSED[_IMAGES], field=_IMAGES)
        self._open_engine(llm_engine, hf_tokenizer, type(sampling_params))
        loop, eos_token_id = asyncio.get_running_loop(), int(hf_tokenizer.eos_token_id)
        call = _Call(self.instance(prompt, label), sampling_params, max_length, eos_token_id, loop)
        row = await self._window.result(f"{prompt}\0{label}", call)
        fields = placeholder_fields(row) if row.masked else response_fields(row.rollout, row.segments[0], row.reward)
        return {"prompt": prompt, "label": label, "images": None, "mm_train_inputs": None} | fields

    def _open_engine(self, llm_engine: Any, tokenizer: Any, sampling_params: type) -> None:
        known = self._engines.bridge is not None or llm_engine is None
        if not known and self.own_engines and not self._trainer_run.names_engines:
            self._engines.bridge = _bridge_of(llm_engine, tokenizer, sampling_params)

    def _run_calls(self, calls: Sequence[_Call]) -> list[StepRow]:
        first = calls[0]
        with self._lock:
            self._n_groups += 1
            step = self._n_groups
        fields = {"sampling": SAMPLING.params(_changed(first.sampling_params))}
        request: dict[str, Any] = {name: value for name, value in fields.items() if name not in self.settings}
        request["limits"] = limits_of(self.settings, max_row_tokens=first.max_length)
        if step == 1 and self._engines.bridge is not None:
            remove_silent_servers(self._trainer_run.client, f"{self.run}-")
        with self._engines.admitted(first.loop):
            rollouts = self._trainer_run.run_samples([call.instance for call in calls], step, **request)
        check_count(len(rollouts), len(calls))
        limits = RowLimits(
            total_tokens=first.max_length, vocabulary=self.vocabulary, too_long=self.too_long, total_option="max_len"
        )
        step_rows = rows_of_step(
            rollouts,
            limits=limits,
            pad_id=first.eos_token_id,
            fallback=self._so_far.fallback(),
            groups=[0] * len(rollouts),
        )
        self._so_far.take([row.reward for row in step_rows if row.scored])
        return _without_advantage(step_rows)


def _bridge_of(llm_engine: Any, tokenizer: Any, sampling_params: type) -> EngineBridge:
    """Return a bridge to an actor's engine; `sampling_params` is the class of vLLM's sampling parameters."""

    async def generate(prompt_ids: list[int], sampling: dict[str, Any], session: str) -> SampledByTrainer:
        # OpenRLHF clears the prefix cache with each weight update
        known = known_parameters(sampling, ("cache_salt",), ("structured_outputs",))
        output = await llm_engine.generate(prompt_ids, sampling_params(**known))
        (sample,) = output.outputs
        token_logprobs = sample.logprobs or []
        logprobs = [by_token[token].logprob for token, by_token in zip(sample.token_ids, token_logprobs, strict=True)]
        seen = output.prompt_token_ids
        reason = sample.finish_reason or "stop"
        return SampledByTrainer(sample.token_ids, logprobs, reason, "", sample.stop_reason, prompt_ids=seen)

    longest = getattr(llm_engine, "kwargs", {}).get("max_model_len")
    return EngineBridge(generate, str(tokenizer.name_or_path), context_tokens=longest)


def _without_advantage(step_rows: Sequence[StepRow]) -> list[StepRow]:
    """Give rows that do not train the mean reward and score of those that do: one of their tokens trains."""
    trained = [row.reward for row in step_rows if not row.masked]
    if not trained:
        return [replace(row, reward=step_rows[0].reward) for row in step_rows]
    mean = sum(trained) / len(trained)
    return [replace(row, reward=mean) if row.masked else row for row in step_rows]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of `execute`."""

    instance: Instance
    sampling_params: Any
    max_length: int
    eos_token_id: int
    loop: asyncio.AbstractEventLoop


def _changed(params: Any) -> dict[str, Any]:
    """Return the set fields of vLLM's sampling parameters, and those that control sampling."""
    own = {name: value for name, value in _fields_of(params).items() if not name.startswith("_")}
    default = _fields_of(type(params)())
    return {
        name: value for name, value in own.items() if name in SamplingParams.model_fields or value != default.get(name)
    }


def _fields_of(params: Any) -> dict[str, Any]:
    names = getattr(params, "__struct_fields__", None) or vars(params)
    return {name: getattr(params, name) for name in names}
