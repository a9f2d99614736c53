#!/usr/bin/env bash
# The trainers that the farm has adapters for, in an environment of its own: environment.sh DIR makes DIR/.venv, 2 GB,
# unless it is there.
#
# Nothing of it is ever a dependency of the farm. Its requirements are pinned and installed as they are listed, as those
# that the packages name contradict each other and would bring CUDA libraries. slime, miles and rLLM are on no package
# index: their sources come from GitHub at the commits below, and where that cannot be reached their tests are left out.
set -euo pipefail

SLIME=624b824a898ab0ec1fcb4d373004c7f3852bf515
RLLM=9beb6e0f676a46d38858991fd79ac5f8e0b16d4c
MILES=31f1ca961a94cb860cec3b2dea34ec332bfa8f76

fail() {
  echo "environment.sh: $*" >&2
  exit 1
}

[ $# -eq 1 ] || fail "usage: environment.sh DIR"
mkdir -p "$1" || fail "cannot make $1"
here=$(cd "$(dirname "$0")" && pwd)
folder=$(cd "$1" && pwd)
python=$folder/.venv/bin/python
log=$folder/install.log

source_of() {  # source_of OWNER/NAME COMMIT: its files in DIR/NAME
  local to=$folder/${1#*/}
  [ -e "$to/$2" ] && return
  rm -rf "$to" && mkdir -p "$to"
  if curl -fsSL --max-time 120 "https://codeload.github.com/$1/tar.gz/$2" 2>>"$log" | tar -xz -C "$to" --strip-components 1 2>>"$log"; then
    touch "$to/$2"
  else
    rm -rf "$to"
    echo "$1 cannot be fetched: its tests are left out"
  fi
}

stamp=$folder/.venv/installed-$(sha256sum "$here/requirements.txt" | cut -c1-16)
if ! [ -e "$stamp" ]; then
  if ! [ -x "$python" ]; then
    # the one that the requirements were tested with
    python3.11 -c 'import ensurepip' 2>/dev/null || fail "Python 3.11 with venv is needed (Debian 12: apt-get install python3-venv)"
    python3.11 -m venv --clear "$folder/.venv"
  fi
  echo "installing the trainers into $folder"
  : >"$log"
  for words in "setuptools==78.1.1" "-r $here/requirements.txt"; do
    # shellcheck disable=SC2086
    "$python" -m pip --disable-pip-version-check --no-input install --no-deps $words >>"$log" 2>&1 \
      || { tail -5 "$log" >&2; fail "pip failed, see $log"; }
  done
  rm -f "$folder"/.venv/installed-*
  touch "$stamp"
fi
source_of THUDM/slime "$SLIME"
source_of radixark/miles "$MILES"
source_of rllm-org/rllm "$RLLM"
