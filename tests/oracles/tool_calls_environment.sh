#!/usr/bin/env bash
# vLLM, SGLang and renderers in a separate environment: tool_calls_environment.sh DIR makes DIR/.venv, 3.2 GB, unless it
# exists. They are never dependencies of the farm; only their parsers of tool calls are imported.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=examples/training/python_environment.sh
. "$here/../../examples/training/python_environment.sh"

sum=$(sha256sum "$here/tool_calls_requirements.txt" | cut -c1-16)
if ! is_whole "$sum"; then
  # the version that the requirements were tested with
  begin "the parsers of tool calls (3.2 GB)" python3.11
  export PIP_NO_COMPILE=1
  install_all "$here/tool_calls_requirements.txt"
  finish "$sum"
fi
