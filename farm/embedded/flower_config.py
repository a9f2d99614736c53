"""Flower's configuration, a file that Flower executes: authentication, also of the metrics, which are open by default.

Only `/healthcheck` stays open, for the probes of containers, which have no key: it says OK and nothing else.
"""

from __future__ import annotations

import os

from flower.views.monitor import Metrics
from tornado.web import authenticated

USER = "farm"

basic_auth = [f"{USER}:{os.environ['FARM_API_KEY']}"]
Metrics.get = authenticated(Metrics.get)
