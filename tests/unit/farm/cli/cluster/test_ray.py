"""`farm ray` where Ray is not installed; with it, `make test-ray`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from farm.cli.cluster.ray import ray
from tests.services.commands import output_of


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_command_without_ray_names_the_extra() -> None:
    assert "a farm on Ray needs more than the packages installed here (ray missing): pip install" in output_of(
        ray, "up", code=1
    )
