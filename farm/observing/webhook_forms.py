"""The bodies of webhooks about the end of a batch and about alarms. A protocol may add a form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from farm.errors import NotFound
from farm.plugins import load
from farm.store import batches
from farm.store.database import Store
from farm.store.webhooks.outbox import ALARM, Outgoing


def body_of(store: Store, message: Outgoing) -> Mapping[str, Any] | None:
    """Return the body of a message; None if its batch is gone. Raises NotFound for an unknown form."""
    if message.form == ALARM:
        return {"event": ALARM, "alarm": message.subject, "at": message.created_at}
    form = load("farm.webhook_forms", message.form)
    try:
        body: Mapping[str, Any] = form(store, message.subject)
    except NotFound:
        return None
    return body


def batch_ended(store: Store, batch_id: str) -> Mapping[str, Any]:
    """Return the present numbers of a batch. Raises NotFound."""
    status = store.read(partial(batches.status, batch_id=batch_id))
    names = ("batch_id", "n_rollouts", "n_completed", "n_failed", "n_cancelled", "failures", "mean_reward")
    return {"event": "batch_ended", **{name: getattr(status, name) for name in names}, "submitter": status.submitter}
