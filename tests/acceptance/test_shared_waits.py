"""Shared preparation pauses the clocks of the rollouts that wait for it, and of the one that makes it."""

from __future__ import annotations

import time
from typing import Any

import farm
from tests.services.farms import embedded, farm_folder, left_of, until
from tests.services.gated_package import REQUIREMENT, GatedPackage
from tests.services.unruly import installed_in

INIT_S, OVERDUE_S = 4.0, 2.0


def test_shared_installation_is_excluded_from_rollout_timeouts() -> None:
    with farm_folder() as folder:
        package = GatedPackage(folder)
        env: dict[str, Any] = (
            installed_in(folder) | package.environment | {"FARM_OVERDUE_S": str(OVERDUE_S), "FARM_WARM_POOL": "0"}
        )
        fields = {"where": "host", "packages": [REQUIREMENT]}
        request = {
            "instances": [{"data_source": "unruly", "fields": fields}],
            "n_samples": 3,
            "limits": {"init_s": INIT_S},
            "max_attempts": 1,
        }
        with embedded(folder, **env) as here, farm.connect(here.store_url, broker_url=here.broker_url) as client:
            # one-time work of a worker is over
            client.collect(client.submit({"instances": [{"data_source": "unruly", "fields": {"where": "host"}}]}))
            batch_id = client.submit(request)
            until(lambda: package.n_builds, "the installation has begun")
            # one installs and the others wait, beyond every limit of their stage
            time.sleep(INIT_S + OVERDUE_S + 1.5)
            package.open()
            result = client.collect(batch_id, timeout_s=120)
            assert [(rollout.reward, rollout.failure) for rollout in result] == [(1.0, None)] * 3
            assert package.n_builds == 1
        assert left_of(folder) == []
