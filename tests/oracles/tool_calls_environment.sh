#!/usr/bin/env bash
# vLLM, SGLang and renderers in an environment of their own: tool_calls_environment.sh DIR makes DIR/.venv, 3.2 GB, unless
# it is there. Nothing of it is ever a dependency of the farm; only the parsers of tool calls are imported.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=examples/training/python_environment.sh
. "$here/../../examples/training/python_environment.sh"

stamp=$folder/.venv/installed-$(sha256sum "$here/tool_calls_requirements.txt" | cut -c1-16)
if ! [ -e "$stamp" ]; then
  # the one that the requirements were tested with
  first_python python3.11
  echo "installing the parsers of tool calls (3.2 GB) into $folder"
  : >"$log"
  pip install --no-deps --no-compile -r "$here/tool_calls_requirements.txt"
  rm -f "$folder"/.venv/installed-*
  touch "$stamp"
fi
