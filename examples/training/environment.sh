#!/usr/bin/env bash
# A trainer and a real vLLM for a CPU, in an environment of their own: environment.sh DIR makes DIR/.venv, 3.4 GB, unless
# it is there. It has what the client of the farm needs, too; the farm itself is found by PYTHONPATH.
#
# Nothing of it is ever a dependency of the farm. Its requirements are pinned and installed as they are listed, as those
# that the package names would bring CUDA libraries.
set -euo pipefail

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

sum=$(cat "$here/requirements.txt" "$here"/vllm_plugin/*.* | sha256sum | cut -c1-16)
stamp=$folder/.venv/installed-$sum
[ -e "$stamp" ] && exit 0

if ! [ -x "$python" ]; then
  for name in python3.11 python3.12 python3.13 python3; do
    "$name" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && break
  done || fail "Python 3.11, 3.12 or 3.13 with venv is needed (Debian: apt-get install python3 python3-venv)"
  "$name" -m venv --clear "$folder/.venv"
fi

pip() {
  "$python" -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 \
    || { tail -5 "$log" >&2; fail "pip failed, see $log"; }
}

echo "installing vLLM and what a trainer needs (3.4 GB) into $folder"
: >"$log"
pip install --no-deps setuptools==78.1.1
pip install --no-deps -r "$here/requirements.txt"

# Building leaves files beside the sources.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp "$here"/vllm_plugin/*.* "$copy"
pip install --no-deps --no-build-isolation --force-reinstall "$copy"

rm -f "$folder"/.venv/installed-*
touch "$stamp"
