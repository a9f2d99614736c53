#!/usr/bin/env bash
# Ray, in a separate folder: environment.sh DIR installs it below DIR/packages, 260 MB, unless it exists. It is never a
# dependency of the farm's tests.
set -euo pipefail

PACKAGES=(ray==2.60.0)

folder=$1
stamp=$folder/packages/installed-$(printf '%s\n' "${PACKAGES[@]}" | sha256sum | cut -c1-16)
if ! [ -e "$stamp" ]; then
  rm -rf "$folder/packages" && mkdir -p "$folder"
  .venv/bin/python -m pip --disable-pip-version-check --no-input install -q --target "$folder/packages" "${PACKAGES[@]}"
  touch "$stamp"
fi
