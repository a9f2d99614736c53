"""The adapter of OpenEnv, with the classes of `openenv_counter` sent along."""

from __future__ import annotations

from workers.environments.adapters.openenv import OpenEnv


class OpenEnvCounter(OpenEnv):
    """Its classes are `openenv_counter:CountUp` and `openenv_counter:CounterAction`."""

    modules = (*OpenEnv.modules, "openenv_counter", "workers.environments.adapters.openenv")
