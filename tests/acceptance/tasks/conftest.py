"""Fixtures of the tests of tasks, which those of the integration tests share."""

from __future__ import annotations

from tests.integration.tasks.conftest import place as place
