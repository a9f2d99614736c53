"""The request for a batch: instances, sampling parameters, limits of a rollout. Plain values, validated on entry."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sized
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from farm.engine_urls import normal_url, sound_key
from farm.errors import InvalidRequest
from farm.records.request_values import Count as Count
from farm.records.request_values import Json, Name, Request, Seconds, Webhook, plain
from farm.records.request_values import SamplingParams as SamplingParams
from farm.records.sandbox_spec import Archive as Archive
from farm.records.sandbox_spec import SandboxLimits as SandboxLimits
from farm.records.sandbox_spec import SandboxSpec as SandboxSpec
from farm.records.values import size_of

MAX_INSTANCES = 100_000
"""In one batch."""
MAX_INSTANCE_BYTES = 16_000_000
"""The most bytes of one instance's fields as JSON: 16 MB."""
MAX_REQUEST_BYTES = 512_000_000
"""The most bytes of the fields of all instances of a batch: 512 MB."""
MAX_ENGINES = 10_000
"""The most different engines that the instances of a batch may bring along."""


class EngineEndpoint(Request):
    """The address of an LLM server and its key."""

    engine_url: Annotated[Name, Field(max_length=2000)] = ""
    """Its address, `http://HOST:PORT/v1`, as the nodes reach it."""
    engine_key: Annotated[Name, Field(repr=False)] = ""
    """Its API key, a secret: stored with the batch, sent to `engine_url` alone, and shown nowhere."""

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
        """Refuse settings of an engine that is not named."""
        if not self.engine_url:
            for name, field in type(self).model_fields.items():
                if name.startswith("engine_") and getattr(self, name) != field.default:
                    raise ValueError(f"{name} is set, and no engine_url: name the server that it is for")
        return self


class EngineSettings(EngineEndpoint):
    """A dedicated engine: an LLM server that a batch or an instance brings along for its rollouts, such as a trainer's.

    It is used by these rollouts alone, which use no other; it is not registered with the farm, and has nothing to do
    with the farm's weights. Without `engine_url` the farm's engines are used.
    """

    engine_model: Annotated[Name, Field(max_length=200)] = ""
    """The model to ask it for; empty: the batch's `model`, else the first that it lists."""
    engine_tokenizer: Annotated[Name, Field(max_length=1000)] = ""
    """A folder or a name on a hub, where the engine does not say it itself."""
    engine_tool_format: Annotated[Name, Field(max_length=64)] = ""
    """The format in which its model writes tool calls, where the chat template does not show it."""
    engine_route: Literal["detect", "chat"] = "detect"
    """`detect`: its capabilities are probed by sampling two tokens, and the best wire for token ids is used. `chat`: it
    is sent the rollout's own requests alone, as plain chat completions that ask for no token ids, as where the server
    itself keeps every call as data to train on; its rollouts have rewards and no training rows."""

    @property
    def engine_settings(self) -> EngineSettings:
        """The settings of the engine alone."""
        return EngineSettings(**{name: getattr(self, name) for name in EngineSettings.model_fields})


def _checked(check: Callable[[str], str], given: str) -> str:
    try:
        return check(given)
    except InvalidRequest as error:
        raise ValueError(error.complaints[0][1]) from None


class Instance(EngineSettings):
    """One problem. `fields` are the handler's own; it checks them when the batch is submitted.

    With an `engine_url`, its samples are played on that engine, and none of the batch's own settings of one are used.
    """

    data_source: Annotated[Name, Field(min_length=1, max_length=64)]
    fields: dict[str, Any]
    """At most MAX_INSTANCE_BYTES of JSON: finite numbers, integers of 64 bits, text without NUL, 64 levels."""
    instance_id: Annotated[Name, Field(max_length=200)] = ""
    archive: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """The digest of an uploaded task archive (`Farm.upload_archive`), which any number of instances may share."""

    @property
    def digest(self) -> str:
        """A hash of the problem, whatever its name: 64 hexadecimal digits."""
        parts = [self.data_source, self.fields, *([self.archive] if self.archive else [])]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def named(self) -> Instance:
        """Return it with a name, for want of one a hash of its fields: by that it is found again in other batches."""
        if self.instance_id:
            return self
        return self.model_copy(update={"instance_id": self.digest[:16]})

    @field_validator("fields")
    @classmethod
    def _are_json(cls, given: dict[str, Any]) -> dict[str, Any]:
        size_of(given, MAX_INSTANCE_BYTES)
        return given


class Limits(Request):
    """Limits of one attempt. A limit the policy reaches is an outcome; its score counts.

    The clocks run while the stage works; waiting in a queue costs nothing.
    """

    max_turns: Count = 32
    max_repeats: Annotated[int, Field(ge=2, le=1000)] | None = None
    """Turns in a row that call the same tools with the same arguments and get the same results; so many end the
    rollout, and so do six that alternate between two such turns. None: no limit."""
    max_tokens: Count = 32_768
    """Sampled tokens over all turns."""
    max_row_tokens: Count | None = None
    """Tokens of a training row: its prompt, what was sampled and what tools returned between. A row that is full ends
    the rollout as a full context does. Engines that take no token ids do not keep it."""
    max_response_tokens: Count | None = None
    """Tokens of a training row after its first prompt, likewise."""
    max_prompt_tokens: Count | None = None
    """Tokens of a call's prompt, likewise."""
    init_s: Seconds = 300.0
    run_s: Seconds = 900.0
    eval_s: Seconds = 600.0
    tool_s: Seconds = 60.0
    """One tool call; its partial output goes to the model."""
    max_observation_chars: Count = 16_000
    """The most characters a tool call may return to the model; the middle is cut out."""
    task_time_factor: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """The factor of a time limit that a task states itself; see `with_task_times`."""
    task_time_cap_s: Seconds = 14_400.0
    """The most that such a limit may come to."""

    def with_task_times(self, times: TaskTimes) -> Limits:
        """Return the limits of a task that states time limits of its own.

        The one rule: a limit that the task states replaces the batch's, as the task's value times `task_time_factor`,
        at most `task_time_cap_s`; one that it leaves out is the batch's.
        """
        stated = {name: value for name, value in times if value is not None}
        return self.model_copy(
            update={name: min(value * self.task_time_factor, self.task_time_cap_s) for name, value in stated.items()}
        )


class TaskTimes(Request):
    """Time limits that a task states itself, in seconds; None where it states none."""

    init_s: Seconds | None = None
    """To start and prepare its sandbox. Building an image has a limit of its own, off the clock."""
    run_s: Seconds | None = None
    """For the agent."""
    eval_s: Seconds | None = None
    """For the evaluator."""


SecretName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Secret = Annotated[str, Field(max_length=65_536), AfterValidator(plain)]

VerificationRule = Literal["guarded", "as_authors"]

Role = Literal["judge", "user", "helper"]
"""A part that a model other than the policy plays: it scores answers, is the user that the policy talks to, or helps an
agent program, which asks for it by this name."""


class AgentRequests(Request):
    """The rule for requests of agent programs that not every engine can answer."""

    forms: Literal["guide", "require", "ignore"] = "guide"
    """A tool that must be called, or a JSON schema for the answer: `guide` holds the decoding to it where the engine
    can, and samples freely elsewhere, or where it refuses the schema; `require` refuses the request there; `ignore`
    never holds it."""
    images: Literal["refuse", "text", "engine"] = "refuse"
    """Images, audio and files: `text` shows the policy a line in their place. `engine` sends images (PNG, JPEG, WebP,
    GIF) to an engine whose model takes them, by its chat route, and refuses the rest."""


class TrainCalls(Request):
    """The model calls of a rollout that train: those that every condition takes. Tokens of the others have mask 0."""

    last: Count | None = None
    """Of those that the other conditions take, only so many of the last."""
    labels: dict[Name, Name] = Field(default_factory=dict)
    """Label → a pattern such as `claude-*`, which the call's label matches."""
    without: dict[Name, Name] = Field(default_factory=dict)
    """Label → a pattern that the call's label, if it has it, does not match."""


class RoleEngine(EngineEndpoint):
    """The LLM of a role: a server of its own by `engine_url`, or else the engines of the farm that serve `model`.

    It is sent plain chat requests. What it says is recorded apart from the policy's calls, and never trained on.
    """

    model: Annotated[Name, Field(max_length=200)] = ""
    """The model to ask for; may be empty with an `engine_url`: then the first that the server lists."""
    sampling: SamplingParams | None = None
    """In place of the sampling parameters that the role's plug-in would use; the seed stays the plug-in's."""
    timeout_s: Seconds = 180.0
    """One answer, with the retries of a server that fails."""
    n_parallel: Annotated[int, Field(ge=1, le=4096)] = 32
    """The most calls at a time that each worker process makes; the others wait for their turn."""

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        """Refuse a role without a server and without a model."""
        if not self.engine_url and not self.model:
            raise ValueError("name the server, engine_url, or the model of the farm's engines that plays the role")
        if self.sampling is not None and self.sampling.routed_experts is not None:
            raise ValueError("routed_experts of its sampling: they are recorded of the policy alone")
        return self


def roles_missing(data_source: str, roles: Iterable[str]) -> str:
    """Return what to say of an instance whose batch names no LLM for these roles."""
    names = " and ".join(f"{role!r}" for role in roles)
    return (
        f"data source {data_source!r} needs an LLM of the role {names}, and the batch names none: set "
        'roles = {"ROLE": {"engine_url": "http://HOST:PORT/v1", "model": "NAME"}}'
    )


_CONVERSATION = frozenset({"messages", "tools", "add_generation_prompt", "generation_prompt", "self"})


class BatchSettings(Request):
    """The part of a batch's request that its stages and plug-ins see, without instances and engines.

    Handlers have it as `TaskContext.batch`.
    """

    n_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()
    model: Annotated[Name, Field(max_length=200)] = ""
    roles: dict[Role, RoleEngine] = Field(default_factory=dict)
    """The LLMs of the roles besides the policy. Refused if an instance needs a role that is not named here."""
    agent: Annotated[Name, Field(max_length=64)] = ""
    """The agent that plays it, an entry point of `farm.agents`; empty takes the handler's choice."""
    agent_requests: AgentRequests = AgentRequests()
    train_calls: TrainCalls = TrainCalls()
    """A handler may narrow it by a rule of its own."""
    row_builder: Annotated[Name, Field(min_length=1, max_length=64)] = "prefix"
    """The maker of rows from the calls that train, an entry point of `farm.row_builders`: `prefix` joins calls
    that continue each other, `per_call` makes a row of each."""
    chat_template_kwargs: Json = Field(default_factory=dict)
    """Given to the model's chat template, such as `enable_thinking`."""
    rewritten_history: Literal["segment", "keep"] = "segment"
    """If a chat template rewrites earlier turns, such as by dropping their reasoning: `segment` prompts as the
    template does, which begins a new training row; `keep` goes on from the ids as they were sampled."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Weight versions that may lie between a rollout's oldest sampled token and the newest weights; None: any.
    Checked before and after each call; a version that is no number is never too old."""
    on_stale: Literal["restart", "drop"] = "drop"
    """A rollout beyond `max_staleness` is restarted, which is no failed attempt, or ends as `stale`.

    It ends so, too, once it was restarted `max_attempts` times."""
    sandbox: Annotated[Name, Field(max_length=64)] = "auto"
    """The kind of sandbox: `auto`, `singularity` or `namespace`."""
    network: Literal["refuse", "allow", "off"] = "refuse"
    """The answer to an instance that asks for the network: it is refused at submit, gets it, or is played without."""
    verification: VerificationRule = "guarded"
    """The rule for tests that run in what the policy left: `guarded` brings back what the image runs by itself;
    `as_authors` runs them in all of it."""
    reward: Annotated[Name, Field(max_length=200)] | dict[str, float] = ""
    """The reward that counts of scores that have several by name: the name of one, or weights by name, of which the
    weighted sum counts. Empty: the evaluator's own choice."""
    secrets: Annotated[dict[SecretName, Secret], Field(repr=False, max_length=1000)] = Field(default_factory=dict)
    """Values for the variables that tasks name in their environment tables, and the only source of these: stored with
    the batch as keys of engines are, shown nowhere, and blotted out of what is recorded."""

    @field_validator("reward")
    @classmethod
    def _has_weights(cls, given: str | dict[str, float]) -> str | dict[str, float]:
        """Refuse weights that are none, or not finite."""
        if isinstance(given, dict) and not (given and all(map(math.isfinite, given.values()))):
            raise ValueError("weights must be finite numbers, at least one")
        return given

    @field_validator("chat_template_kwargs")
    @classmethod
    def _beside_the_conversation(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Refuse template variables that are the conversation itself, which a batch may not set."""
        if taken := _CONVERSATION & given.keys():
            raise ValueError(f"{', '.join(sorted(taken))} cannot be set: the farm gives it to the template")
        return given


class BatchRequest(BatchSettings, EngineSettings):
    """One submit: every instance is played `n_samples` times.

    Instances with one `instance_id` must be equal, as they are one problem: repeats are allowed, two problems of one
    name are not. All together have at most MAX_REQUEST_BYTES of fields.

    The same `idempotency_key` names the same batch however often it is submitted.
    `model` picks among the farm's engines; empty takes any. With an `engine_url`, all of it is played on that engine,
    but for instances that have one of their own.
    """

    instances: Annotated[tuple[Instance, ...], Field(min_length=1, max_length=MAX_INSTANCES)]
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """A higher one is placed first, and while any of it waits a lower one gets nothing. Batches of one priority take
    turns, whatever their sizes. What has been placed is not taken back: it is played first."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Attempts that may fail through the farm's fault before a rollout is given up."""
    max_losses: Annotated[int, Field(ge=0, le=1000)] = 10
    """Times it may be lost with a worker or a node and be played again, which does not count as a failure."""
    quarantine_after: Annotated[int, Field(ge=0, le=10_000)] = 6
    """After so many failed attempts at an instance, none of whose samples was ever scored, those of its samples that
    wait to be played fail at once; 0: never. A sample must have failed twice, and on two nodes where there are two."""
    webhook: Webhook | None = None
    """Told when the batch has ended. Its host must be one of FARM_WEBHOOK_HOSTS, unless who submits may do all."""
    idempotency_key: Annotated[Name, Field(min_length=1, max_length=200)] | None = None
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{0,64}$")] = ""
    """The training run that asks for it, by which solve rates are counted; `farm.collecting` sets it."""
    metadata: Json = Field(default_factory=dict)
    """The trainer's own; the farm stores it and does not read it. Up to 1 MB."""
    findings: Annotated[tuple[Annotated[Name, Field(max_length=2000)], ...], Field(max_length=20)] = ()
    """Lines on what `farm tasks attack` found of its instances, which are shown with the batch and change nothing.
    `submit` writes them from the reports in FARM_HOME if there are none."""

    def stored(self) -> dict[str, Any]:
        """Return it as JSON without its instances, but with the engines that they bring along, each once in `engines`.

        `engine` is the place of the batch's own there, `engine_of_instance` those of instances by their place.
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
        """Check their number before each is validated."""
        if isinstance(given, Sized) and len(given) > MAX_INSTANCES:
            raise ValueError(f"there are {len(given)}; {MAX_INSTANCES} may be: submit several batches")
        return given

    @field_validator("instances")
    @classmethod
    def _of_one_name(cls, given: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Refuse instances of one name with different fields, and more than MAX_REQUEST_BYTES of fields in all."""
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
            raise ValueError(f"they bring {n_engines} engines; {MAX_ENGINES} may be: submit several batches")
        n_bytes = sum(size_of(instance.fields, MAX_INSTANCE_BYTES) for instance in given)
        if n_bytes > MAX_REQUEST_BYTES:
            raise ValueError(f"their fields have {n_bytes} bytes; {MAX_REQUEST_BYTES} may be: submit several batches")
        return given

    @model_validator(mode="after")
    def _have_ids(self) -> Self:
        """Refuse routed experts of an engine that is asked for no token ids."""
        settings: tuple[EngineSettings, ...] = (self, *self.instances)
        if self.sampling.routed_experts is not None and any(each.engine_route == "chat" for each in settings):
            raise ValueError("routed_experts of its sampling: an engine with engine_route `chat` gives none")
        if self.sampling.routed_experts is not None and self.agent_requests.images == "engine":
            raise ValueError(
                "routed_experts of its sampling: calls with images, which agent_requests.images allows, have none"
            )
        return self
