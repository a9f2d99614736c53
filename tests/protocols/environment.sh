#!/usr/bin/env bash
# The systems whose protocols the farm's API supports, if they can be installed: environment.sh DIR makes an environment
# for each in DIR, unless it exists. They are never dependencies of the farm.
set -euo pipefail

# shellcheck source=tests/services/python_environments.sh
. "$(dirname "$0")/../services/python_environments.sh"

environment agent-lightning python3.12 --no-deps agentlightning==1.0.2 httpx==0.28.1 httpx-retries==0.6.0 httpcore==1.0.9 \
  h11==0.16.0 anyio==4.16.0 certifi idna==3.20 pydantic==2.14.4 pydantic_core==2.50.5 annotated-types==0.8.0 \
  typing-inspection==0.4.5 typing_extensions==4.16.0 numpy==2.5.5
# it requires a newer patch release of Python than its code needs
environment nemo-gym python3.13 --ignore-requires-python nemo-gym==0.7.0
# it imports aiohttp without requiring it
environment swe-rex python3.12 swe-rex==1.4.0 aiohttp==3.14.5
# with a tool in a request, newer releases of litellm import a package that they do not require
environment mini-swe-agent python3.12 mini-swe-agent==2.4.6 litellm==1.80.5 openai==2.8.1 swe-rex==1.4.0 aiohttp==3.14.5
environment e2b python3.12 e2b==2.63.0
node_environment e2b-js e2b@2.51.0
