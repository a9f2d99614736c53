#!/usr/bin/env bash
# A trainer and a real vLLM for the CPU, in a separate environment: environment.sh DIR makes DIR/.venv, 3.4 GB, unless it
# exists. It includes the requirements of the farm's client; the farm itself is found by PYTHONPATH.
#
# None of these packages is a dependency of the farm. They are pinned and installed exactly as listed, as the declared
# requirements would bring CUDA libraries.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=examples/training/python_environment.sh
. "$here/python_environment.sh"

sum=$(cat "$here/requirements.txt" "$here"/vllm_plugin/*.* | sha256sum | cut -c1-16)
is_whole "$sum" && exit 0

begin "vLLM and what a trainer needs (3.4 GB)" python3.11 python3.12 python3.13 python3
install --no-deps setuptools==78.1.1
install_all "$here/requirements.txt"

# Building leaves files next to the sources.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp "$here"/vllm_plugin/*.* "$copy"
install --no-deps --no-build-isolation --force-reinstall "$copy"
finish "$sum"
