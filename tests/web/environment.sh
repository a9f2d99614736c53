#!/usr/bin/env bash
# Packages that control a browser in tests, in a separate folder: environment.sh DIR installs Playwright and axe-core
# below DIR/packages, 150 MB, unless they exist. The browser is Debian's: apt-get install chromium.
set -euo pipefail

PACKAGES=(playwright==1.65.2 axe-playwright-python==0.1.8)

folder=$1
stamp=$folder/packages/installed-$(printf '%s\n' "${PACKAGES[@]}" | sha256sum | cut -c1-16)
if [ -n "${FARM_BROWSER:-}" ] && ! command -v "$FARM_BROWSER" >/dev/null; then
  echo "the tests of the page need a browser: FARM_BROWSER=$FARM_BROWSER is no program" >&2
  exit 1
elif [ -z "${FARM_BROWSER:-}" ] && ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; then
  echo "the tests of the page need a browser: apt-get install chromium, or set FARM_BROWSER" >&2
  exit 1
fi
if ! [ -e "$stamp" ]; then
  rm -rf "$folder/packages" && mkdir -p "$folder"
  .venv/bin/python -m pip --disable-pip-version-check --no-input install -q --target "$folder/packages" "${PACKAGES[@]}"
  touch "$stamp"
fi
