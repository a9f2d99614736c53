"""Flower's configuration, a file that Flower executes: authentication (also for metrics, which are open by default),
reconciliation of its tasks with the store, and the text of its rows.

Only `/healthcheck` stays open, for the probes of containers, which have no key: it says OK and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from flower.events import Events
from flower.views.monitor import Metrics
from tornado.ioloop import PeriodicCallback
from tornado.web import authenticated

from farm.embedded import flower_tasks
from farm.embedded.flower_tasks import PERIOD_MS, FlowerReconciler
from farm.settings import settings

USER = "farm"

basic_auth = [f"{USER}:{settings().api_key}"]
format_task = flower_tasks.format_task
Metrics.get = authenticated(Metrics.get)


def _start(events: Events, start: Callable[[Events], None] = Events.start) -> None:
    start(events)
    PeriodicCallback(FlowerReconciler(events).reconcile, PERIOD_MS).start()


Events.start = _start
