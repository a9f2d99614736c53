#!/usr/bin/env bash
# A trainer and a real vLLM for a CPU, in an environment of their own: environment.sh DIR makes DIR/.venv, 3.4 GB, unless
# it is there. It has what the client of the farm needs, too; the farm itself is found by PYTHONPATH.
#
# Nothing of it is ever a dependency of the farm. Its requirements are pinned and installed as they are listed, as those
# that the package names would bring CUDA libraries.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=examples/training/python_environment.sh
. "$here/python_environment.sh"

sum=$(cat "$here/requirements.txt" "$here"/vllm_plugin/*.* | sha256sum | cut -c1-16)
stamp=$folder/.venv/installed-$sum
[ -e "$stamp" ] && exit 0

first_python python3.11 python3.12 python3.13 python3
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
