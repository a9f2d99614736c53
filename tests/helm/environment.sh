#!/usr/bin/env bash
# Packages that render and check the chart, in a separate folder: environment.sh DIR installs Helm's engine and the
# schemas of Kubernetes below DIR/packages, 350 MB, unless they exist. They are never dependencies of the farm.
set -euo pipefail

PACKAGES=(helm-python-sdk==0.2.2 kubernetes-validate==1.37.0)

folder=$1
stamp=$folder/packages/installed-$(printf '%s\n' "${PACKAGES[@]}" | sha256sum | cut -c1-16)
if ! [ -e "$stamp" ]; then
  rm -rf "$folder/packages" && mkdir -p "$folder"
  .venv/bin/python -m pip --disable-pip-version-check --no-input install -q --target "$folder/packages" "${PACKAGES[@]}"
  touch "$stamp"
fi
