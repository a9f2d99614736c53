#!/usr/bin/env bash
# Installs packages of this machine's distribution under one prefix, without root: debian_packages.sh PREFIX PACKAGE...
#
# They are unpacked instead of installed: an installed server would also be started as a service.
set -euo pipefail

fail() {
  echo "debian_packages.sh: $*" >&2
  exit 1
}

[ $# -ge 2 ] || fail "usage: debian_packages.sh PREFIX PACKAGE..."
mkdir -p "$1" || fail "cannot make $1"
prefix=$(cd "$1" && pwd)
shift

for program in apt-get dpkg; do
  command -v "$program" >/dev/null || fail "no $program here: install your distribution's $1"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,packages}
options=(-qq -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User= -o Debug::NoLocking=1)
apt-get "${options[@]}" update >"$work/log" 2>&1 || fail "no package list: $(tail -1 "$work/log")"
(cd "$work/packages" && apt-get "${options[@]}" download "$@") >"$work/log" 2>&1 ||
  fail "the packages cannot be fetched: $(tail -1 "$work/log")"

for package in "$work"/packages/*.deb; do
  dpkg -x "$package" "$prefix" || fail "$(basename "$package") cannot be unpacked in $prefix"
done
