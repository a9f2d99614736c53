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
is_whole "$sum" && exit 0

begin "vLLM and what a trainer needs (3.4 GB)" python3.11 python3.12 python3.13 python3
install --no-deps setuptools==78.1.1
install_all "$here/requirements.txt"

# Building leaves files beside the sources.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp "$here"/vllm_plugin/*.* "$copy"
install --no-deps --no-build-isolation --force-reinstall "$copy"
finish "$sum"
