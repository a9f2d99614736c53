#!/usr/bin/env bash
# The packages whose own code is the reference for the farm's parsing: environment.sh DIR makes an environment for each
# in DIR, unless it exists. They are never dependencies of the farm.
set -euo pipefail

# shellcheck source=tests/services/python_environments.sh
. "$(dirname "$0")/../services/python_environments.sh"
# shellcheck source=tests/services/github_sources.sh
. "$(dirname "$0")/../services/github_sources.sh"

environment harbor python3.12 harbor==0.25.0
# its parsers and models need only these
environment terminal-bench python3.12 --no-deps terminal-bench==0.2.18 ruamel.yaml==0.19.1 pyyaml==6.0.4 pydantic==2.14.4 \
  pydantic_core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 typing_extensions==4.16.0
# only their scorers are imported; NeMo Gym's server needs a later Python, its functions run on this one
environment answer-rules python3.12 --no-deps --ignore-requires-python verl==0.9.1 skyrl-gym==0.4.0 nemo-gym==0.7.0 \
  math-verify==0.9.0 latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2 sympy==1.14.0 mpmath==1.3.0 \
  pylatexenc==2.11 numpy==2.4.6
# slime is on no package index: its rewards come from its sources
folder=$root/answer-rules
mkdir -p "$folder"
# shellcheck disable=SC2034
log=$root/answer-rules/install.log
source_of THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515
# only its stuck detector is imported, with the events that it reads
environment openhands python3.12 --no-deps openhands-ai==0.59.0 pydantic==2.14.4 pydantic_core==2.50.5 \
  annotated-types==0.8.0 typing-inspection==0.4.5 typing_extensions==4.16.0
environment pyte python3.11 pyte==0.8.2 wcwidth==0.9.4
