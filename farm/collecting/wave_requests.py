"""The request of a wave: a run's request for every instance, checked before anything runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from farm.client.request_checks import checked_request
from farm.collecting.options import CollectingOptions
from farm.collecting.waves import METADATA
from farm.errors import InvalidRequest
from farm.records.request import BatchRequest, Instance

_OWN = ("instances", "idempotency_key", "run")
_PLACE = re.compile(r"^instances\[(\d+)\]")


def checked_fields(request: Mapping[str, Any], options: CollectingOptions) -> BatchRequest:
    """Return the request of a wave, with one placeholder instance. Raises InvalidRequest naming the field."""
    fields = dict(request)
    for name in _OWN:
        if name in fields:
            raise InvalidRequest("the collector sets it", field=f"request.{name}")
    if METADATA in fields.get("metadata", {}):
        raise InvalidRequest("the collector sets it", field=f"request.metadata.{METADATA}")
    if fields.setdefault("max_staleness", options.max_staleness) != options.max_staleness:
        raise InvalidRequest(
            f"{fields['max_staleness']}, but the options have max_staleness={options.max_staleness}",
            field="request.max_staleness",
        )
    return checked_request({**fields, "instances": [{"data_source": "any", "fields": {}}]})


def of_instance(complaint: tuple[str, str], instances: Sequence[Instance]) -> tuple[str, str]:
    """Return a complaint about a wave with the instance's name in place of its index."""

    def name(found: re.Match[str]) -> str:
        instance = instances[int(found[1])]
        return f"instance {instance.instance_id!r} of {instance.data_source}"

    field, message = complaint
    return _PLACE.sub(name, field), message
