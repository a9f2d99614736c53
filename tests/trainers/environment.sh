#!/usr/bin/env bash
# The trainers that the farm has adapters for, in a separate environment: environment.sh DIR makes DIR/.venv, 2 GB,
# unless it exists.
#
# They are never dependencies of the farm. The requirements are pinned and installed as listed, because those that the
# packages declare contradict each other and would install CUDA libraries. slime, miles, rLLM, prime-rl and its
# verifiers are on no package index, and Agent Lightning's package has no examples: their sources are fetched from GitHub
# at the commits below into folders of these names in DIR. If GitHub is unreachable, a copy in the same place is used;
# without one their tests are skipped.
set -euo pipefail

SLIME=624b824a898ab0ec1fcb4d373004c7f3852bf515
RLLM=9beb6e0f676a46d38858991fd79ac5f8e0b16d4c
MILES=31f1ca961a94cb860cec3b2dea34ec332bfa8f76
AGENT_LIGHTNING=c632d8dd804103bd421c65208bc501952689039f
PRIME_RL=559b44772e471d1538537b8805cc77f3824a5e64
# as that commit of prime-rl pins it
VERIFIERS=a60a606ecc4d309247edf9ff92c3eabca362781f

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=examples/training/python_environment.sh
. "$here/../../examples/training/python_environment.sh"
# shellcheck source=tests/services/github_sources.sh
. "$here/../services/github_sources.sh"

sum=$(sha256sum "$here/requirements.txt" | cut -c1-16)
if ! is_whole "$sum"; then
  # the version that the requirements were tested with
  begin "the trainers (2 GB)" python3.11
  install --no-deps setuptools==78.1.1
  install_all "$here/requirements.txt"
  # Agent Lightning's trainer is for this release
  install --no-deps --target "$folder/verl-0.8" verl==0.8.0
  finish "$sum"
fi
if ! [ -e "$folder/mcp-1" ]; then
  # that verifiers is for this release
  rm -rf "$folder/mcp-1.part"
  install --no-deps --target "$folder/mcp-1.part" mcp==1.28.1 httpx-sse==0.4.3
  mv "$folder/mcp-1.part" "$folder/mcp-1"
fi
source_of THUDM/slime "$SLIME"
source_of radixark/miles "$MILES"
source_of rllm-org/rllm "$RLLM"
source_of PrimeIntellect-ai/prime-rl "$PRIME_RL"
source_of PrimeIntellect-ai/verifiers "$VERIFIERS" verifiers-a60a606
source_of microsoft/agent-lightning "$AGENT_LIGHTNING"
