#!/usr/bin/env bash
# The systems whose protocols the farm's API speaks, as far as they install: environment.sh DIR makes an environment for
# each in DIR, unless it is there. Nothing of it is ever a dependency of the farm.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: environment.sh DIR" >&2; exit 1; }
mkdir -p "$1"
root=$(cd "$1" && pwd)

environment() {  # environment NAME PYTHON WHAT...: DIR/NAME/.venv with these packages; none where that Python is missing
  local name=$1 python=$2 folder=$root/$1
  shift 2
  local stamp
  stamp=$folder/.venv/installed-$(printf '%s ' "$@" | sha256sum | cut -c1-16)
  [ -e "$stamp" ] && return
  # pyenv has its versions beside each other, and a name for none of them
  local exact
  exact=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"${python#python}".*/bin/python 2>/dev/null | tail -1 || true)
  if ! "$python" -c '' 2>/dev/null; then
    [ -n "$exact" ] || { echo "there is no $python, so the tests of $name are left out"; return; }
    python=$exact
  fi
  echo "installing $name into $folder"
  mkdir -p "$folder"
  "$python" -m venv --clear "$folder/.venv"
  "$folder/.venv/bin/python" -m pip --disable-pip-version-check --no-input install "$@" >"$folder/install.log" 2>&1 \
    || { tail -5 "$folder/install.log" >&2; exit 1; }
  touch "$stamp"
}

environment agent-lightning python3.12 --no-deps agentlightning==1.0.2 httpx==0.28.1 httpx-retries==0.6.0 httpcore==1.0.9 \
  h11==0.16.0 anyio==4.16.0 certifi idna==3.20 pydantic==2.14.4 pydantic_core==2.50.5 annotated-types==0.8.0 \
  typing-inspection==0.4.5 typing_extensions==4.16.0 numpy==2.5.5
# it asks for a newer patch release of Python than its code needs
environment nemo-gym python3.13 --ignore-requires-python nemo-gym==0.7.0
# it imports aiohttp, and does not say so
environment swe-rex python3.12 swe-rex==1.4.0 aiohttp==3.14.5
