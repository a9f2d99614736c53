"""The environment of OpenEnv's own template: it echoes a message, for 0.1 a character."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from workers.environments.adapters.openenv import OpenEnv
from workers.environments.environment import Begin, Episode

_NAMES = {"__ENV_CLASS_NAME__": "Echo", "__ENV_TITLE_NAME__": "Echo", "__ENV_NAME__": "echo"}


class OpenEnvEcho(OpenEnv):
    """The template, filled in as `openenv init` does."""

    modules = (*OpenEnv.modules, "workers.environments.adapters.openenv")

    def reset(self, episode: Episode) -> Begin:
        import openenv.cli

        folder = Path(openenv.cli.__path__[0]) / "templates" / "openenv_env"
        for name, path in (("models", "models.py"), ("echo_server", "server/__ENV_NAME___environment.py")):
            text = (folder / path).read_text()
            for mark, value in _NAMES.items():
                text = text.replace(mark, value)
            module = sys.modules[name] = ModuleType(name)
            exec(compile(text, name, "exec"), module.__dict__)
        kwargs = {"environment": "echo_server:EchoEnvironment", "action": "models:EchoAction"}
        return super().reset(Episode(kwargs=kwargs, seed=episode.seed))
