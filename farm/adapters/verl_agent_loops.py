"""verl's agent loop manager on the farm. Needs verl; imported only by its trainer.

    # my_farm.py: +actor_rollout_ref.rollout.agent.agent_loop_manager_class=my_farm.Manager
    class Manager(FarmAgentLoopManager):
        connect = staticmethod(farm.connect)

V0's trainer waits for a `DataProto` with a row for every sample: a failed rollout has a placeholder there. V1's trainer
does not wait: each prompt's rows go into TransferQueue when the last of its rollouts has ended. A prompt with a failed
rollout is then a `failure`, with the rows of the others: verl evicts and replaces it, or trains on those.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.model import compute_position_id_with_mask
from verl.utils.ray_utils import auto_await

from farm.adapters.engine_bridge import OwnEngines
from farm.adapters.single_row import BrokenRollouts, RowLimits, StepRow, TooLong, rows_of_step, with_experts
from farm.adapters.trainer_step import Phase, StepSamples, TrainerRun, check_count, instance_of
from farm.adapters.verl import (
    ROUTING_REPLAY,
    bridge_of,
    check_rollout_config,
    experts_form,
    output_fields,
    padded_experts,
    rollout_request,
)
from farm.client.connect import connect as connect_farm
from farm.client.farm import Farm
from farm.errors import InvalidRequest
from farm.records.request import Instance
from farm.records.rollout import Rollout

log = logging.getLogger(__name__)


class FarmAgentLoopManager:
    """Runs verl's prompts on a farm. A subclass sets the attributes and is named in verl's configuration.

    `run` is the name of the training run, by default verl's project and experiment. `instance(row)` returns a prompt's
    instance; by default it is in the data set's column `farm_instance`. `settings` are further fields of
    `BatchRequest`. It uses verl's own servers, through the client that verl passes. With `own_engines` False, or a
    `model` or an `engine_url` in the settings, it uses the farm's engines; `name_weights` then sets their weight
    version to verl's step in each step: for engines that verl itself updates, which must not be in use at that moment.
    """

    connect: ClassVar[Callable[[], Farm]] = staticmethod(connect_farm)
    run: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, Any]] = {}
    broken: ClassVar[BrokenRollouts] = "neutral"
    too_long: ClassVar[TooLong] = "error"
    every_segment: ClassVar[bool] = True
    """V1 only: a row for each segment. V0 takes one row for each sample."""
    own_engines: ClassVar[bool] = True
    bridge_host: ClassVar[str] = ""
    """This machine's address as reachable from the farm's nodes; by default that of its default route."""
    name_weights: ClassVar[bool] = False
    timeout_s: ClassVar[float | None] = None
    pad_id: ClassVar[int] = 0
    """V0 only: the padding token, which every mask excludes."""

    @classmethod
    @auto_await  # type: ignore[untyped-decorator, unused-ignore]
    async def create(cls, *args: Any, **kwargs: Any) -> FarmAgentLoopManager:
        """Return the manager; arguments as in verl's own."""
        return cls(*args, **kwargs)

    def __init__(
        self,
        config: Any,
        llm_client: Any = None,
        teacher_client: Any = None,
        reward_loop_worker_handles: Sequence[Any] | None = None,
    ) -> None:
        if teacher_client:
            raise InvalidRequest("the farm gets no log-probabilities from a teacher", field="distillation")
        self.config = config
        self.rollout_config = config.actor_rollout_ref.rollout
        check_rollout_config(self.rollout_config)
        self._experts = experts_form(config)
        self.llm_client = llm_client
        name = self.run or f"{config.trainer.project_name}-{config.trainer.experiment_name}"
        self.client = type(self).connect()
        self.trainer_run = TrainerRun(self.client, name, self.settings, self.timeout_s)
        self._engines = OwnEngines(self.trainer_run, self.bridge_host)
        if llm_client is not None and self.own_engines and not self.trainer_run.names_engines:
            self._engines.bridge = bridge_of(llm_client, config.actor_rollout_ref)
        self._reward_handles = reward_loop_worker_handles
        self._threads: set[threading.Thread] = set()
        self._failure: Exception | None = None

    def instance(self, row: Mapping[str, Any]) -> Instance:
        """Return the instance of a prompt, which is a row of verl's data set."""
        return instance_of(row)

    def generate_sequences(self, prompts: Any) -> DataProto | None:
        """Run a batch of prompts: waits for V0's `DataProto`, but not for V1's `TensorDict`."""
        if self._failure is not None:
            raise self._failure
        if isinstance(prompts, DataProto):
            return self._gather(prompts)
        self._dispatch(prompts)
        return None

    # V0

    def _gather(self, prompts: DataProto) -> DataProto:
        table = prompts.non_tensor_batch
        if not all(table.get("__do_sample__", [True])):
            raise InvalidRequest("it needs additional greedy samples", field="algorithm.adv_estimator")
        columns = [{name: values[index] for name, values in table.items()} for index in range(len(prompts))]
        listed = [self.instance(row) for row in columns]
        step, validate = int(prompts.meta_info.get("global_steps", 0)), bool(prompts.meta_info.get("validate", False))
        self._name_weights(step)
        with self._engines.admitted():
            rollouts = self.trainer_run.run_samples(listed, step, _phase(validate), **self._request(validate))
        check_count(len(rollouts), len(prompts))
        groups = list(table["uid"]) if "uid" in table else None
        step_rows = rows_of_step(rollouts, broken=self.broken, limits=self._limits(), pad_id=self.pad_id, groups=groups)
        if self._experts is not None and not validate:
            step_rows = with_experts(step_rows, self._experts, ROUTING_REPLAY)
        # with reward workers, verl's own manager only passes on the messages
        kept = (
            table if self._reward_handles is None else {name: table[name] for name in ("raw_prompt",) if name in table}
        )
        lengths = self.rollout_config.prompt_length, self.rollout_config.response_length
        return data_proto(step_rows, *lengths, kept, self.pad_id)

    # V1

    def _dispatch(self, prompts: TensorDict) -> None:
        """Submit a batch of prompts, and write its results in a thread."""
        validate = bool(_plain(prompts.pop("validate", False)))
        rows = [{name: _plain(value, index) for name, value in prompts.items()} for index in range(len(prompts))]
        default = self.rollout_config.val_kwargs.n if validate else self.rollout_config.n
        numbers = [int(row.pop("__rollout_n__", default)) for row in rows]
        listed = [self.instance(row) for row, n in zip(rows, numbers, strict=True) for _ in range(n)]
        step = int(rows[0]["global_steps"])
        self._name_weights(step)
        with contextlib.ExitStack() as admitted:
            admitted.enter_context(self._engines.admitted())
            batch_id, samples = self.trainer_run.submit(listed, step, _phase(validate), **self._request(validate))
            writer = _PromptWriter("val" if validate else "train", rows, numbers)
            writer.begin()
            # its engines are admitted until it has ended
            arguments = (batch_id, samples, writer, admitted.pop_all())
        thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _write(
        self, batch_id: str, samples: StepSamples, writer: _PromptWriter, admitted: contextlib.ExitStack
    ) -> None:
        try:
            indexes = defaultdict(list)
            for index, position in enumerate(samples.positions):
                indexes[position].append(index)
            for group in self.client.stream_groups(batch_id, cursor=0):
                for rollout in group.rollouts:
                    for index in indexes[rollout.group_index, rollout.sample_index]:
                        writer.take(index, rollout, partial(self._rows, validate=writer.validates))
        except Exception as error:
            # raised in the trainer when it requests the next batch: verl would replace mere failures forever
            self._failure = error
            log.exception("Batch %s: prompts without a result count as failures", batch_id)
            writer.give_up()
        finally:
            admitted.close()
            self._threads.discard(threading.current_thread())

    def _rows(self, rollouts: Sequence[Rollout], *, validate: bool) -> list[StepRow]:
        step_rows = rows_of_step(rollouts, limits=self._limits(), every_segment=self.every_segment, fallback=0.0)
        if self._experts is None or validate:
            return step_rows
        return with_experts(step_rows, self._experts, ROUTING_REPLAY)

    # both

    def _limits(self) -> RowLimits:
        return RowLimits(
            prompt_tokens=self.rollout_config.prompt_length,
            response_tokens=self.rollout_config.response_length,
            too_long=self.too_long,
            prompt_option="actor_rollout_ref.rollout.prompt_length",
            response_option="actor_rollout_ref.rollout.response_length",
        )

    def _request(self, validate: bool) -> dict[str, Any]:
        """Return the fields of a batch from verl's configuration, except those in the settings."""
        return rollout_request(self.rollout_config, self.settings, validate=validate, experts=self._experts)

    def _name_weights(self, step: int) -> None:
        if self.name_weights and self.client.newest_version() != str(step):
            self.client.set_version(step)


class _PromptWriter:
    """Writes prompts into TransferQueue: each when the last of its samples has ended, its rows before its status."""

    def __init__(self, partition: str, rows: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> None:
        self._partition = partition
        self._rows = rows
        self._numbers = numbers
        self._prompt_of = [prompt for prompt, n in enumerate(numbers) for _ in range(n)]
        self._first = np.concatenate([[0], np.cumsum(numbers)]).tolist()
        self._ended: list[dict[int, Rollout]] = [{} for _ in rows]
        self._written: set[int] = set()

    @property
    def validates(self) -> bool:
        """True for prompts of an evaluation."""
        return self._partition == "val"

    def begin(self) -> None:
        """Tag all prompts as running."""
        for prompt in range(len(self._rows)):
            self._tag(prompt, "running")

    def take(self, index: int, rollout: Rollout, rows: Callable[[Sequence[Rollout]], list[StepRow]]) -> None:
        """Add the rollout of the sample at this index of the list, and write its prompt if it was the last."""
        prompt = self._prompt_of[index]
        ended = self._ended[prompt]
        ended[index - self._first[prompt]] = rollout
        if len(ended) == self._numbers[prompt] and prompt not in self._written:
            self._write(prompt, rows([ended[session] for session in range(len(ended))]))

    def give_up(self) -> None:
        """Tag the unwritten prompts as failures."""
        for prompt in range(len(self._rows)):
            if prompt not in self._written:
                self._tag(prompt, "failure")

    def _write(self, prompt: int, step_rows: Sequence[StepRow]) -> None:
        import transfer_queue as tq
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        row = self._rows[prompt]
        keys, fields, tags = [], [], []
        if self._partition == "train" and self._numbers[prompt] > 1 and sum(row.scored for row in step_rows) < 2:
            # verl's estimators give the single row of a group its reward as advantage: there is nothing to compare
            step_rows = [replace(each, scored=False, too_long=False) for each in step_rows]
        for session, step_row in enumerate(step_rows):
            for index, segment in enumerate(step_row.segments if step_row.scored else ()):
                output = agent_loop_output(output_fields(step_row.rollout, segment, step_row.reward))
                keys.append(f"{row['uid']}_{session}_{index}")
                fields.append(transfer_fields(output, {**row, "session_id": session}))
                tags.append(_tags(output, row))
        if keys:
            tq.kv_batch_put(
                keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id=self._partition
            )
        whole = all(each.scored or each.too_long for each in step_rows)
        self._tag(prompt, "finished" if whole and keys else "failure")
        self._written.add(prompt)

    def _tag(self, prompt: int, status: str) -> None:
        import transfer_queue as tq

        tq.kv_put(key=self._rows[prompt]["uid"], partition_id=self._partition, tag={"status": status})


def agent_loop_output(fields: Mapping[str, Any]) -> AgentLoopOutput:
    """Return verl's record with these fields, which it checks."""
    return AgentLoopOutput(**{**fields, "metrics": AgentLoopMetrics(**fields["metrics"])})


def transfer_fields(output: AgentLoopOutput, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of one row as verl's own worker puts them into TransferQueue."""
    fields: dict[str, Any] = output.as_dict() | {name: value for name, value in row.items() if name != "agent_name"}
    input_ids = torch.cat([fields["prompts"], fields["responses"]])
    attention_mask = torch.ones_like(input_ids)
    fields.pop("multi_modal_data", None)
    return fields | {
        "loss_mask": fields["response_mask"],
        "input_ids": input_ids,
        "position_ids": compute_position_id_with_mask(attention_mask.unsqueeze(0)).squeeze(0),
        "multi_modal_inputs": {},
    }


def _tags(output: AgentLoopOutput, row: Mapping[str, Any]) -> dict[str, Any]:
    n_prompt, n_response = len(output.prompt_ids), len(output.response_ids)
    step = int(row["global_steps"])
    oldest, newest = output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]
    return {
        "status": "success",
        "prompt_len": n_prompt,
        "response_len": n_response,
        "seq_len": n_prompt + n_response,
        "global_steps": step,
        # verl takes them for integers: for weights without a number, the step that asked
        "min_global_steps": step if oldest is None else oldest,
        "max_global_steps": step if newest is None else newest,
    }


def data_proto(
    step_rows: Sequence[StepRow],
    prompt_length: int,
    response_length: int,
    table: Mapping[str, Any],
    pad_id: int = 0,
) -> DataProto:
    """Return V0's batch: prompts padded on the left, responses on the right, the reward on each row's last token.

    `table` are the prompts' own columns, which verl's manager passes on without reward workers.
    """
    fields = [output_fields(row.rollout, row.segments[0], row.reward) for row in step_rows]
    n = len(fields)
    prompts, prompt_mask = _padded([each["prompt_ids"] for each in fields], prompt_length, pad_id, left=True)
    responses, response_there = _padded([each["response_ids"] for each in fields], response_length, pad_id)
    response_mask, _ = _padded([each["response_mask"] for each in fields], response_length)
    logprobs, _ = _padded([each["response_logprobs"] for each in fields], response_length, dtype=torch.float32)
    attention_mask = torch.cat([prompt_mask, response_there], dim=1)
    rm_scores = torch.zeros(n, response_length)
    rm_scores[torch.arange(n), response_there.sum(dim=1) - 1] = torch.tensor([each["reward_score"] for each in fields])
    experts = padded_experts(fields, prompt_length, prompt_length + response_length)
    extra = [each["extra_fields"] for each in fields]
    columns = {name: _objects([each[name] for each in extra]) for name in extra[0]}
    return DataProto(
        batch=TensorDict(
            {
                "prompts": prompts,
                "responses": responses,
                "response_mask": response_mask,
                "input_ids": torch.cat([prompts, responses], dim=1),
                "attention_mask": attention_mask,
                "position_ids": compute_position_id_with_mask(attention_mask),
                "rollout_log_probs": logprobs,
                "rm_scores": rm_scores,
                **{name: torch.from_numpy(value) for name, value in experts.items()},
            },
            batch_size=n,
        ),
        non_tensor_batch={
            **{name: value for name, value in table.items() if name != "__do_sample__"},
            **columns,
            "acc": np.array([each["reward_score"] for each in fields]),
            "extras": _objects([None] * n),
            "multi_modal_inputs": _objects([{} for _ in fields]),
            "__num_turns__": np.array([each["num_turns"] for each in fields], np.int32),
        },
        meta_info={"timing": {}, "reward_extra_keys": ["acc"]},
    )


def _padded(
    values: Sequence[Sequence[float]], width: int, pad: int = 0, left: bool = False, dtype: torch.dtype = torch.int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of one width, and 1 where there is a value."""
    padded, mask = (
        torch.full((len(values), width), pad, dtype=dtype),
        torch.zeros(len(values), width, dtype=torch.int64),
    )
    for index, row in enumerate(values):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        padded[index, columns] = torch.tensor(row, dtype=dtype)
        mask[index, columns] = 1
    return padded, mask


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _plain(value: Any, index: int | None = None) -> Any:
    """Return a value of a TensorDict as a Python value: of one row, or what all rows share."""
    from tensordict import NonTensorData, NonTensorStack

    if isinstance(value, NonTensorStack):
        return value[index or 0].data
    if isinstance(value, NonTensorData):
        return value.data
    if isinstance(value, torch.Tensor) and index is not None:
        return value[index]
    return value


def _phase(validate: bool) -> Phase:
    return "eval" if validate else "train"
