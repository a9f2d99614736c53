"""Builds and policies on bases like the official Python and Node images: Debian with an interpreter in /usr/local."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.installers.conftest import base_alias
from workers.plugins.interfaces import Sandbox

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

PYTHON = """\
FROM base:python
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install -y --no-install-recommends git tree && rm -rf /var/lib/apt/lists/*
RUN pip install six==1.16.0
RUN useradd --create-home app
USER app
WORKDIR /home/app
RUN python -m venv venv && venv/bin/pip install idna && pip install --user toml
USER root
"""
PYTHON_USES = {
    "root": ("python -c 'import six; print(six.__version__)'; git --version | cut -c1-3", "1.16.0 git"),
    "pip": ("pip install -q tomli && python -c 'import tomli; print(tomli.__name__)'", "tomli"),
    "owners": ("stat -c %U /home/app/venv/bin /usr/local/bin/python3", "app root"),
    "user": (
        'su app -c \'python -c "import toml, six; print(toml.__name__)"; ~/venv/bin/python -c "import idna"\'',
        "toml",
    ),
    "apt": ("apt-get update >/dev/null && apt-get install -y --no-install-recommends jq >/dev/null && jq -n 1", "1"),
}
NODE = """\
FROM base:node
RUN apt-get update && apt-get install -y --no-install-recommends git procps
RUN npm install -g semver@7.6.0
WORKDIR /home/node/app
RUN chown node:node .
USER node
RUN npm init -y && npm install left-pad@1.3.0
RUN echo "console.log(require('left-pad')('x', 3, '-'))" >pad.js && echo "console.log(require('is-odd')(3))" >odd.js
USER root
"""
NODE_USES = {
    "root": ("semver 1.2.3 -i minor; node -p 1+1", "1.3.0 2"),
    "owners": ("stat -c %U . package.json node_modules/left-pad", "node node node"),
    "user": ("su node -c 'node pad.js; id -u'", "--x 1000"),
    "npm": ("su node -c 'npm install --silent is-odd@3.0.1 && node odd.js'", "true"),
    "global": ("npm install -g --silent cowsay@1.6.0 >/dev/null && cowsay hi | grep -c hi", "1"),
}
CASES = {"python": (PYTHON, PYTHON_USES, "/root"), "node": (NODE, NODE_USES, "/home/node/app")}


@pytest.mark.parametrize("name", CASES)
def test_language_image_is_built_and_used(
    sandbox_settings: None, start: Start, run: Run, tmp_path: Path, name: str
) -> None:
    dockerfile, uses, workdir = CASES[name]
    (tmp_path / "Dockerfile").write_text(dockerfile)
    with base_alias(name):
        sandbox = start(image=f"dockerfile:{tmp_path}", workdir=workdir, network=True, image_first=True)
        failed = {}
        for what, (script, answer) in uses.items():
            result = run(sandbox.exec(["bash", "-c", script], timeout_s=120))
            if " ".join(result.stdout.decode().split()) != answer:
                failed[what] = (result.code, result.stdout, result.stderr[-500:])
        assert not failed
