"""Checks of a request before anything is stored: all faults at once, by field."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError

from farm.callers import Caller, Scope
from farm.errors import Forbidden, InvalidRequest, UnknownHandler
from farm.plugins import entry_point, installed, load
from farm.records.engine_state import StoredEngine
from farm.records.request import BatchRequest, Instance, SandboxSpec, roles_missing
from farm.records.request_values import Request, Webhook
from farm.records.task_needs import unsupported
from farm.row_builders import GROUP as ROW_BUILDERS
from farm.tasks.known_tasks import findings_of

R = TypeVar("R", bound=Request)

HANDLERS = "farm.handlers"
WEBHOOK_FORMS = "farm.webhook_forms"
"""Entry points of webhook formats: functions of the store and a batch id that return a body."""
SANDBOXES = "farm.sandboxes"
MAX_COMPLAINTS = 20
"""Faults of a request that are reported at a time."""
_MAX_IMAGES = 32
"""Images that are checked per request; the others are assumed to exist."""


def checked_request(request: BatchRequest | Mapping[str, Any]) -> BatchRequest:
    """Return the validated request. Raises InvalidRequest naming the field."""
    if isinstance(request, BatchRequest):
        return request
    return checked(BatchRequest, request)


def with_findings(request: BatchRequest, home: Path) -> BatchRequest:
    """Return the request with the findings about its tasks that are stored in `home`, unless it has some."""
    if not request.findings and (findings := findings_of(home, request.instances)):
        return request.model_copy(update={"findings": findings})
    return request


def checked(kind: type[R], values: Any, path: str = "") -> R:
    """Return a request with these values. Raises InvalidRequest naming the field, below `path`."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise invalid(error, path) from None


def check_plugin(group: str, name: str, field: str, any_of_them: str) -> None:
    if name != any_of_them and entry_point(group, name) is None:
        names = ", ".join(sorted(installed(group)))
        raise InvalidRequest(f"there is no {field} {name!r}; installed here: {names}", field=field)


def check_plugins(request: BatchRequest) -> None:
    """Raise InvalidRequest for a plug-in that is not installed here."""
    check_plugin("farm.agents", request.agent, "agent", "")
    check_plugin(SANDBOXES, request.sandbox, "sandbox", "auto")
    check_plugin(ROW_BUILDERS, request.row_builder, "row_builder", "")


def check_webhook(webhook: Webhook | None, hosts: str, caller: Caller) -> None:
    """Raise InvalidRequest or Forbidden for a webhook address that the caller may not use.

    The farm calls it from inside its network, so only admins may name hosts that the farm does not allow.
    """
    if webhook is None:
        return
    check_plugin(WEBHOOK_FORMS, webhook.form, "webhook.form", "")
    try:
        address = urlsplit(webhook.url)
        names = {address.netloc.lower(), (address.hostname or "").lower() if address.port is None else ""} - {""}
    except ValueError as error:
        raise InvalidRequest(f"must be an address: {error}", field="webhook.url") from None
    allowed = {host.strip().lower() for host in hosts.split(",")} - {""}
    if not caller.may(Scope.ADMIN) and not names & allowed:
        hosts_allowed = ", ".join(sorted(allowed)) or "none"
        known = f"the hosts that this farm calls (FARM_WEBHOOK_HOSTS: {hosts_allowed})"
        raise Forbidden(f"webhook.url: {address.netloc} is not one of {known}")


def check_instances(
    request: BatchRequest, served: Callable[[], Collection[str]], engines: Callable[[], Sequence[StoredEngine]]
) -> None:
    """Raise InvalidRequest with all faults of the instances, or UnknownHandler.

    `served` returns the handlers of all nodes, installed here or not; nodes check instances of the others. `engines`
    returns the farm's engines.
    """
    on_nodes: Collection[str] | None = None
    complaints: list[tuple[str, str]] = []
    for index, instance in enumerate(request.instances):
        path = f"instances[{index}]"
        if instance.data_source in installed(HANDLERS):
            handler_type = load(HANDLERS, instance.data_source)
            complaints += instance_complaints(handler_type, instance.fields, request, f"{path}.fields")
            if len(complaints) >= MAX_COMPLAINTS:
                break
            continue
        on_nodes = served() if on_nodes is None else on_nodes
        if instance.data_source not in on_nodes:
            names = ", ".join(sorted({*installed(HANDLERS), *on_nodes}))
            raise UnknownHandler(f"{path}.data_source: no handler for {instance.data_source!r}; this farm has: {names}")
    if complaints:
        raise InvalidRequest.of(complaints[:MAX_COMPLAINTS])
    check_tool_formats(request, engines)


def check_tool_formats(request: BatchRequest, engines: Callable[[], Sequence[StoredEngine]]) -> None:
    """Raise InvalidRequest for instances with tools if no engine's tool calls can be parsed.

    Tool calls would be taken for answers and scored. The formats are known once a node has read the models' chat
    templates. A batch or instance with a dedicated engine is checked where it runs.
    """
    with_tools = [
        index
        for index, instance in enumerate(request.instances)
        if not (request.engine_url or instance.engine_url)
        and instance.data_source in installed(HANDLERS)
        and load(HANDLERS, instance.data_source).tools
    ]
    known = engines() if with_tools else ()
    if not known or any(each.info is None or each.tool_format or each.info.tool_format != "none" for each in known):
        return
    names = ", ".join(sorted({str(each.info and each.info.model) for each in known}))
    reason = (
        f"its handler has tools, but the chat template of {names} has no tool call format known to the farm: "
        "add the engine with its tool_format (docs/concepts/engines/tool_calls.md)"
    )
    raise InvalidRequest.of([(f"instances[{index}].data_source", reason) for index in with_tools[:MAX_COMPLAINTS]])


def check_images(request: BatchRequest, are_here: Callable[[], bool]) -> None:
    """Raise InvalidRequest for instances that name an image which is known to be missing.

    Known only if all nodes `are_here`, on this machine and in this process's home, and if the sandbox kind can tell.
    """
    specs: dict[str, SandboxSpec] = {}
    named: dict[str, list[int]] = {}
    for index, instance in enumerate(request.instances):
        name = instance.fields.get("image")
        if isinstance(name, str) and name not in ("", "host") and instance.data_source in installed(HANDLERS):
            if name not in specs and len(specs) < _MAX_IMAGES and (spec := _spec_of(instance, name)):
                specs[name] = spec
            named.setdefault(name, []).append(index)
    if not specs or not are_here():
        return
    kinds = [load(SANDBOXES, name) for name in installed(SANDBOXES) if request.sandbox in ("auto", name)]
    if not all(hasattr(kind, "absent_image") for kind in kinds):
        return

    def complaint(spec: SandboxSpec) -> str:
        # `auto` may choose any of them
        reasons = [kind().absent_image(spec) for kind in kinds]
        return reasons[0] if all(reasons) else ""

    with ThreadPoolExecutor(len(specs), "images") as pool:
        reasons = dict(zip(specs, pool.map(complaint, specs.values()), strict=True))
    complaints = [
        (f"instances[{index}].fields.image", reasons[name])
        for name, indexes in named.items()
        for index in indexes
        if reasons.get(name)
    ]
    if complaints:
        raise InvalidRequest.of(complaints[:MAX_COMPLAINTS])


def _spec_of(instance: Instance, image: str) -> SandboxSpec | None:
    """Return an instance's sandbox if it uses the image that the instance names."""
    handler_type = load(HANDLERS, instance.data_source)
    try:
        handler = handler_type(handler_type.instance_type.model_validate(instance.fields))
    except Exception:
        # the rollout reports that its handler fails
        return None
    spec = _known_spec(handler)
    return spec if spec is not None and spec.image == image else None


def fingerprint(request: BatchRequest) -> str:
    """Return a hash that identifies a request.

    Default values are left out, as a newer farm may add settings. Engine keys, secrets and findings are left out, too:
    they do not change what is requested.
    """
    keys: Any = {"engine_key": True, "secrets": True, "findings": True, "instances": {"__all__": {"engine_key"}}}
    return hashlib.sha256(request.model_dump_json(exclude_defaults=True, exclude=keys).encode()).hexdigest()


def instance_complaints(
    handler_type: Any, fields: Mapping[str, Any], request: BatchRequest, path: str
) -> Sequence[tuple[str, str]]:
    """Return the faults of an instance's fields, and its needs that the farm or its batch does not meet."""
    try:
        instance = handler_type.instance_type.model_validate(fields)
    except ValidationError as error:
        return invalid(error, path).complaints
    except Exception as error:
        return [(path, f"its handler cannot parse it: {type(error).__name__}: {error}")]
    try:
        handler = handler_type(instance)
        reasons = unsupported(handler.needs(), _known_spec(handler), request.network)
        missing = [role for role in handler.roles() if role not in request.roles]
    except Exception as error:
        return [(path, f"its handler cannot tell what it needs: {type(error).__name__}: {error}")]
    complaints = [(path, f"it asks for {reason}") for reason in reasons]
    return [*complaints, (path, roles_missing(handler.data_source, missing))] if missing else complaints


def _known_spec(handler: Any) -> SandboxSpec | None:
    """Return the sandbox of a problem, if its handler knows it without the task's archive and secrets."""
    try:
        spec = handler.sandbox()
    except Exception:
        return None
    return spec if isinstance(spec, SandboxSpec) else None


def invalid(error: ValidationError, path: str = "") -> InvalidRequest:
    """Return an error with the faults (at most MAX_COMPLAINTS), each with its full path."""
    complaints: list[tuple[str, str]] = []
    errors = error.errors(include_url=False, include_input=False)
    inside = {each["loc"][:depth] for each in errors for depth in range(len(each["loc"]))}
    for each in errors:
        if each["loc"] in inside or len(complaints) == MAX_COMPLAINTS:
            # an error about the whole, e.g. "nothing left", follows from an error inside it
            continue
        field = path
        for part in each["loc"]:
            field += f"[{part}]" if isinstance(part, int) else f".{part}"
        complaints.append((field.lstrip(".") or "request", each["msg"].removeprefix("Value error, ")))
    return InvalidRequest.of(complaints)
