"""The request for a batch: instances, sampling parameters, limits. Plain values, validated on construction."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sized
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from farm.configuration.service_urls import normal_url, sound_key
from farm.errors import InvalidRequest
from farm.records.request_values import Count as Count
from farm.records.request_values import Json, Name, Request, Seconds, Webhook, plain
from farm.records.request_values import SamplingParams as SamplingParams
from farm.records.sandbox_spec import Archive as Archive
from farm.records.sandbox_spec import SandboxLimits as SandboxLimits
from farm.records.sandbox_spec import SandboxSpec as SandboxSpec
from farm.records.values import size_of

MAX_INSTANCES = 100_000
"""Limit per batch."""
MAX_INSTANCE_BYTES = 16_000_000
"""Limit of one instance's fields as JSON: 16 MB."""
MAX_REQUEST_BYTES = 512_000_000
"""Limit of the fields of all instances of a batch: 512 MB."""
MAX_ENGINES = 10_000
"""Limit of distinct dedicated engines of a batch's instances."""


class EngineEndpoint(Request):
    """The address of an LLM server and its key."""

    engine_url: Annotated[Name, Field(max_length=2000)] = ""
    """Its address, `http://HOST:PORT/v1`, as reachable from the nodes."""
    engine_key: Annotated[Name, Field(repr=False)] = ""
    """Its API key, a secret: stored with the batch, sent only to `engine_url`, and never shown."""

    @field_validator("engine_url")
    @classmethod
    def _is_address(cls, given: str) -> str:
        return _checked(normal_url, given) if given else ""

    @field_validator("engine_key")
    @classmethod
    def _is_key(cls, given: str) -> str:
        return _checked(sound_key, given) if given else ""

    @model_validator(mode="after")
    def _have_address(self) -> Self:
        if not self.engine_url:
            for name, field in type(self).model_fields.items():
                if name.startswith("engine_") and getattr(self, name) != field.default:
                    raise ValueError(f"{name} is set, and no engine_url: name the server that it is for")
        return self


class EngineSettings(EngineEndpoint):
    """A dedicated engine: an LLM server for the rollouts of one batch or instance, such as a trainer's.

    These rollouts use no other engine, and no others use it. It is not registered with the farm, and the farm's weight
    versions do not apply to it. Without `engine_url` the farm's engines are used.
    """

    engine_model: Annotated[Name, Field(max_length=200)] = ""
    """The model to request from it; empty: the batch's `model`, else the first that it lists."""
    engine_tokenizer: Annotated[Name, Field(max_length=1000)] = ""
    """A folder or a name on a hub, if the engine does not report it."""
    engine_tool_format: Annotated[Name, Field(max_length=64)] = ""
    """The format of its model's tool calls, if the chat template does not show it."""
    engine_route: Literal["detect", "chat"] = "detect"
    """`detect`: its capabilities are probed by sampling two tokens, and the best route for token ids is used. `chat`:
    it only gets the rollout's own requests, as plain chat completions without token ids, e.g. if the server records
    every call as training data; such rollouts have rewards but no training rows."""

    @property
    def engine_settings(self) -> EngineSettings:
        """The settings of the engine without the instance's other fields."""
        return EngineSettings(**{name: getattr(self, name) for name in EngineSettings.model_fields})


def _checked(check: Callable[[str], str], given: str) -> str:
    try:
        return check(given)
    except InvalidRequest as error:
        raise ValueError(error.complaints[0][1]) from None


class Instance(EngineSettings):
    """One problem. `fields` belong to the handler, which checks them at submit.

    With an `engine_url`, its samples run on that engine, and the batch's engine settings do not apply.
    """

    data_source: Annotated[Name, Field(min_length=1, max_length=64)]
    fields: dict[str, Any]
    """At most MAX_INSTANCE_BYTES of JSON: finite numbers, 64-bit integers, text without NUL, 64 levels."""
    instance_id: Annotated[Name, Field(max_length=200)] = ""
    archive: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """The digest of an uploaded task archive (`Farm.upload_archive`); instances may share one."""

    @property
    def digest(self) -> str:
        """A hash of the problem without its name: 64 hexadecimal digits."""
        parts = [self.data_source, self.fields, *([self.archive] if self.archive else [])]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def named(self) -> Instance:
        """Return it with a name, by default a hash of its fields, which identifies it across batches."""
        if self.instance_id:
            return self
        return self.model_copy(update={"instance_id": self.digest[:16]})

    @field_validator("fields")
    @classmethod
    def _are_json(cls, given: dict[str, Any]) -> dict[str, Any]:
        size_of(given, MAX_INSTANCE_BYTES)
        return given


class Limits(Request):
    """Limits of one attempt. A limit reached by the policy is an outcome; its score counts.

    Only the time of running stages counts, not the time in queues.
    """

    max_turns: Count = 32
    max_repeats: Annotated[int, Field(ge=2, le=1000)] | None = None
    """Consecutive turns with the same tool calls, arguments and results that end the rollout; so do six turns that
    alternate between two. None: no limit."""
    max_tokens: Count = 32_768
    """Sampled tokens over all turns."""
    max_row_tokens: Count | None = None
    """Tokens of a training row: its prompt, sampled tokens and tool results. A full row ends the rollout like a full
    context. Not enforced on engines without token ids."""
    max_response_tokens: Count | None = None
    """Tokens of a training row after its first prompt; as `max_row_tokens`."""
    max_prompt_tokens: Count | None = None
    """Tokens of a call's prompt; as `max_row_tokens`."""
    init_s: Seconds = 300.0
    run_s: Seconds = 900.0
    eval_s: Seconds = 600.0
    tool_s: Seconds = 60.0
    """Seconds for one tool call; its partial output goes to the model."""
    max_observation_chars: Count = 16_000
    """Characters that a tool call may return to the model; the middle of longer results is cut out."""
    task_time_factor: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor for the time limits stated by tasks; see `with_task_times`."""
    task_time_cap_s: Seconds = 14_400.0
    """Maximum of such a limit, in seconds."""

    def with_task_times(self, times: TaskTimes) -> Limits:
        """Return the limits for a task that states its own time limits.

        A limit stated by the task replaces the batch's: the task's value times `task_time_factor`, at most
        `task_time_cap_s`. A limit that it does not state is the batch's.
        """
        stated = {name: value for name, value in times if value is not None}
        return self.model_copy(
            update={name: min(value * self.task_time_factor, self.task_time_cap_s) for name, value in stated.items()}
        )


class TaskTimes(Request):
    """Time limits stated by a task, in seconds; None if not stated."""

    init_s: Seconds | None = None
    """To start and prepare its sandbox. Image builds have a separate limit and do not count."""
    run_s: Seconds | None = None
    """For the agent."""
    eval_s: Seconds | None = None
    """For the evaluator."""


SecretName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Secret = Annotated[str, Field(max_length=65_536), AfterValidator(plain)]

VerificationRule = Literal["guarded", "as_authors"]

Role = Literal["judge", "user", "helper"]
"""The role of a model other than the policy: `judge` scores answers, `user` simulates the user that the policy talks
to, `helper` serves an agent program that requests it by this name."""


class AgentRequests(Request):
    """The rule for requests of agent programs that not every engine supports."""

    forms: Literal["guide", "require", "ignore"] = "guide"
    """For forced tool calls and JSON schemas. `guide`: constrain the decoding if the engine can, else (or if it refuses
    the schema) sample freely. `require`: refuse the request if the engine cannot. `ignore`: never constrain."""
    images: Literal["refuse", "text", "engine"] = "refuse"
    """Images, audio and files. `text`: the policy sees a line of text instead. `engine`: images (PNG, JPEG, WebP, GIF)
    go to an engine whose model takes them, by its chat route; the rest is refused."""


class TrainCalls(Request):
    """The model calls of a rollout that train: those that meet every condition. Tokens of the others have mask 0."""

    last: Count | None = None
    """Only this many of the last calls that meet the other conditions."""
    labels: dict[Name, Name] = Field(default_factory=dict)
    """Label → a pattern such as `claude-*` that the call's label must match."""
    without: dict[Name, Name] = Field(default_factory=dict)
    """Label → a pattern that the call's label, if it has one, must not match."""


class RoleEngine(EngineEndpoint):
    """The LLM of a role: a server given by `engine_url`, or else the farm's engines that serve `model`.

    It gets plain chat requests. Its calls are recorded separately from the policy's, and never trained on.
    """

    model: Annotated[Name, Field(max_length=200)] = ""
    """The model to request; optional with an `engine_url`: by default the first that the server lists."""
    sampling: SamplingParams | None = None
    """Overrides the sampling parameters of the role's plug-in, except the seed."""
    timeout_s: Seconds = 180.0
    """Seconds for one answer, including retries of a failing server."""
    n_parallel: Annotated[int, Field(ge=1, le=4096)] = 32
    """Limit of concurrent calls of each worker process; others wait."""

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if not self.engine_url and not self.model:
            raise ValueError("the role needs a server (engine_url) or the model of the farm's engines (model)")
        if self.sampling is not None and self.sampling.routed_experts is not None:
            raise ValueError("routed_experts of its sampling: they are only recorded for the policy")
        return self


def roles_missing(data_source: str, roles: Iterable[str]) -> str:
    """Return the error for an instance whose batch has no LLM for these roles."""
    names = " and ".join(f"{role!r}" for role in roles)
    return (
        f"data source {data_source!r} needs an LLM for the role {names}, and the batch has none: set "
        'roles = {"ROLE": {"engine_url": "http://HOST:PORT/v1", "model": "NAME"}}'
    )


_CONVERSATION = frozenset({"messages", "tools", "add_generation_prompt", "generation_prompt", "self"})


class BatchSettings(Request):
    """The settings of a batch that its stages and plug-ins see: its request without instances and engines.

    Handlers have it as `TaskContext.batch`.
    """

    n_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()
    model: Annotated[Name, Field(max_length=200)] = ""
    roles: dict[Role, RoleEngine] = Field(default_factory=dict)
    """The LLMs of the roles other than the policy. A batch that lacks a role needed by an instance is refused."""
    agent: Annotated[Name, Field(max_length=64)] = ""
    """The agent, an entry point of `farm.agents`; empty: the handler's choice."""
    agent_requests: AgentRequests = AgentRequests()
    train_calls: TrainCalls = TrainCalls()
    """A handler may restrict it further."""
    row_builder: Annotated[Name, Field(min_length=1, max_length=64)] = "prefix"
    """The builder of rows from the calls that train, an entry point of `farm.row_builders`: `prefix` joins calls that
    continue each other, `per_call` makes a row of each."""
    chat_template_kwargs: Json = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking`."""
    rewritten_history: Literal["segment", "keep"] = "segment"
    """If a chat template rewrites earlier turns, e.g. drops their reasoning: `segment` prompts as the template does,
    which starts a new training row; `keep` continues from the ids as sampled."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Maximum of weight versions between a rollout's oldest sampled token and the newest weights; None: any. Checked
    before and after each call; a version that is not a number is never too old."""
    on_stale: Literal["restart", "drop"] = "drop"
    """For a rollout beyond `max_staleness`: `restart` it (not counted as a failed attempt), or end it as `stale`.

    After `max_attempts` restarts it also ends as `stale`."""
    sandbox: Annotated[Name, Field(max_length=64)] = "auto"
    """The kind of sandbox: `auto`, `singularity` or `namespace`."""
    network: Literal["refuse", "allow", "off"] = "refuse"
    """For instances that ask for the network: `refuse` them at submit, `allow` it, or run them with it `off`."""
    verification: VerificationRule = "guarded"
    """For tests that run in the files left by the policy: `guarded` restores what the image runs by itself;
    `as_authors` runs them in everything it left."""
    reward: Annotated[Name, Field(max_length=200)] | dict[str, float] = ""
    """The score that counts if an evaluator returns several by name: one name, or weights by name for a weighted sum.
    Empty: the evaluator's choice."""
    secrets: Annotated[dict[SecretName, Secret], Field(repr=False, max_length=1000)] = Field(default_factory=dict)
    """Values of the variables in tasks' environment tables, and the only source of these: stored with the batch like
    engine keys, never shown, and redacted in everything recorded."""

    @field_validator("reward")
    @classmethod
    def _has_weights(cls, given: str | dict[str, float]) -> str | dict[str, float]:
        """Refuse empty and non-finite weights."""
        if isinstance(given, dict) and not (given and all(map(math.isfinite, given.values()))):
            raise ValueError("weights must be finite numbers, at least one")
        return given

    @field_validator("chat_template_kwargs")
    @classmethod
    def _without_conversation(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Refuse template variables that hold the conversation, which a batch may not set."""
        if taken := _CONVERSATION & given.keys():
            raise ValueError(f"{', '.join(sorted(taken))} cannot be set: the farm passes it to the template")
        return given


class BatchRequest(BatchSettings, EngineSettings):
    """One submit: every instance is run `n_samples` times.

    Repeated instances are allowed: instances with the same `instance_id` must be equal. All together have at most
    MAX_REQUEST_BYTES of fields.

    Submitting the same `idempotency_key` again returns the same batch. `model` selects among the farm's engines; empty
    takes any. With an `engine_url`, everything runs on that engine, except instances with their own.
    """

    instances: Annotated[tuple[Instance, ...], Field(min_length=1, max_length=MAX_INSTANCES)]
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Higher priorities are placed first, and lower ones get nothing while they wait. Batches of equal priority take
    turns, whatever their sizes. Rollouts that are placed already are not preempted."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Attempts of a rollout that may fail through the farm's fault before it is given up."""
    max_losses: Annotated[int, Field(ge=0, le=1000)] = 10
    """Times a rollout may be lost with a worker or a node and run again, not counted as failures."""
    quarantine_after: Annotated[int, Field(ge=0, le=10_000)] = 6
    """After this many failed attempts at an instance without any scored sample, its waiting samples fail at once; 0:
    never. A sample must have failed twice, and on two nodes if there are two."""
    webhook: Webhook | None = None
    """Called when the batch has ended. Its host must be in FARM_WEBHOOK_HOSTS unless the submitter is an admin."""
    idempotency_key: Annotated[Name, Field(min_length=1, max_length=200)] | None = None
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{0,64}$")] = ""
    """The training run of the batch, by which solve rates are counted; set by `farm.collecting`."""
    metadata: Json = Field(default_factory=dict)
    """The trainer's own data; stored but not read by the farm. Up to 1 MB."""
    findings: Annotated[tuple[Annotated[Name, Field(max_length=2000)], ...], Field(max_length=20)] = ()
    """Lines about findings of `farm tasks attack` on its instances, shown with the batch without any effect. By default
    `submit` takes them from the reports in FARM_HOME."""

    def stored(self) -> dict[str, Any]:
        """Return it as JSON without its instances but with their distinct dedicated engines in `engines`.

        `engine` is the index there of the batch's own, `engine_of_instance` maps instances by index.
        """
        request = self.model_dump(mode="json", exclude={"instances", *EngineSettings.model_fields})
        numbers: dict[EngineSettings, int] = {}
        for settings in (self, *self.instances):
            if settings.engine_url:
                numbers.setdefault(settings.engine_settings, len(numbers))
        if numbers:
            request["engines"] = [engine.model_dump(mode="json", exclude_defaults=True) for engine in numbers]
            request["engine"] = numbers[self.engine_settings] if self.engine_url else None
            request["engine_of_instance"] = {
                str(index): numbers[instance.engine_settings]
                for index, instance in enumerate(self.instances)
                if instance.engine_url
            }
        return request

    @field_validator("instances", mode="before")
    @classmethod
    def _not_too_many(cls, given: Any) -> Any:
        """Check the number of instances before each is validated."""
        if isinstance(given, Sized) and len(given) > MAX_INSTANCES:
            raise ValueError(f"there are {len(given)}; at most {MAX_INSTANCES} are allowed: submit several batches")
        return given

    @field_validator("instances")
    @classmethod
    def _of_one_name(cls, given: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Refuse instances with the same name and different fields, and more than MAX_REQUEST_BYTES of fields."""
        named: dict[tuple[str, str], int] = {}
        for index, instance in enumerate(given):
            first = named.setdefault((instance.data_source, instance.instance_id), index)
            other = given[first]
            if instance.instance_id and (other.fields, other.archive) != (instance.fields, instance.archive):
                raise ValueError(
                    f"instances[{first}] and instances[{index}] are both called {instance.instance_id!r}, "
                    "but have different fields"
                )
        n_engines = len({instance.engine_settings for instance in given if instance.engine_url})
        if n_engines > MAX_ENGINES:
            raise ValueError(
                f"they have {n_engines} engines; at most {MAX_ENGINES} are allowed: submit several batches"
            )
        n_bytes = sum(size_of(instance.fields, MAX_INSTANCE_BYTES) for instance in given)
        if n_bytes > MAX_REQUEST_BYTES:
            raise ValueError(
                f"their fields have {n_bytes} bytes; the limit is {MAX_REQUEST_BYTES}: submit several batches"
            )
        return given

    @model_validator(mode="after")
    def _have_ids(self) -> Self:
        """Refuse routed experts of an engine that returns no token ids."""
        settings: tuple[EngineSettings, ...] = (self, *self.instances)
        if self.sampling.routed_experts is not None and any(each.engine_route == "chat" for each in settings):
            raise ValueError("routed_experts of its sampling: an engine with engine_route `chat` returns none")
        if self.sampling.routed_experts is not None and self.agent_requests.images == "engine":
            raise ValueError(
                "routed_experts of its sampling: calls with images, which agent_requests.images allows, have none"
            )
        return self
