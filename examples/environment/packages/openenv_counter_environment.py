"""The OpenEnv adapter, sent together with the classes of `openenv_counter`."""

from __future__ import annotations

from workers.environments.adapters.openenv import OpenEnv


class OpenEnvCounter(OpenEnv):
    """Uses the classes `openenv_counter:CountUp` and `openenv_counter:CounterAction`."""

    modules = (*OpenEnv.modules, "openenv_counter", "workers.environments.adapters.openenv")
