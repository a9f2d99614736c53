"""The batch of an evaluation: its key derives from its contents, so that an interrupted one continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from farm.client.farm import Farm
from farm.client.request_checks import checked_request
from farm.errors import InvalidRequest
from farm.evaluation.evaluation_report import EvaluationReport, named_rewards, report_of
from farm.records.request import BatchRequest, Instance
from farm.records.training_run import check_run


def evaluation_request(
    problems: Sequence[Instance | Mapping[str, Any]],
    request: Mapping[str, Any],
    *,
    name: str | None = None,
    version: str = "",
) -> BatchRequest:
    """Return the request of an evaluation; `request` are the other fields of a batch.

    Its idempotency key is `eval:NAME`; without a name, a hash of the whole request and of the weights' `version`. So
    weights without a number need a new name whenever they change. Instances without a name get one from their contents,
    by which evaluations are compared. Raises InvalidRequest naming the field.
    """
    if request.get("idempotency_key") is not None:
        raise InvalidRequest("the name of the evaluation sets it", field="idempotency_key")
    checked = checked_request({**request, "instances": list(problems)})
    named = checked.model_copy(update={"instances": tuple(instance.named() for instance in checked.instances)})
    if name is None:
        content = [named.model_dump(mode="json", exclude_defaults=True), version]
        name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]
    else:
        try:
            check_run(name)
        except InvalidRequest as error:
            raise InvalidRequest(error.complaints[0][1], field="name") from None
    return named.model_copy(update={"idempotency_key": f"eval:{name}"})


def evaluate(
    client: Farm,
    problems: Sequence[Instance | Mapping[str, Any]],
    *,
    n_samples: int = 8,
    name: str | None = None,
    request: Mapping[str, Any] | None = None,
    solved_at: float = 1.0,
    timeout_s: float | None = None,
) -> EvaluationReport:
    """Run problems `n_samples` times each, or continue an interrupted run, and return the report.

    Raises InvalidRequest, Conflict for a name that another evaluation has, TimeoutError.
    """
    fields = {**(request or {}), "n_samples": n_samples}
    submitted = evaluation_request(problems, fields, name=name, version=client.newest_version())
    batch_id = client.submit(submitted)
    client.wait(batch_id, timeout_s)
    shown = (submitted.idempotency_key or "").removeprefix("eval:")
    named = {"name": shown, "batch_id": batch_id, "model": submitted.model}
    rollouts = client.rollouts(batch_id)
    by_name = named_rewards(client, rollouts)
    return report_of(rollouts, n_samples=n_samples, solved_at=solved_at, named=by_name, **named)
