#!/usr/bin/env bash
# Base trees for the tests of installers: environment.sh DIR makes DIR/bookworm of Debian, and DIR/noble of Ubuntu if
# UBUNTU_ARCHIVE is the address of an archive of its packages, unless they exist. It needs mmdebstrap, and access to
# Debian's packages.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: environment.sh DIR" >&2; exit 1; }
command -v mmdebstrap >/dev/null || { echo "there is no mmdebstrap: apt-get install mmdebstrap" >&2; exit 1; }
mkdir -p "$1"
root=$(cd "$1" && pwd)
chmod 755 "$root"
apt-config dump | grep '^Acquire::Check' >"$root/apt.conf" || true

make_base() { # SUITE PACKAGES SOURCE
  [ -d "$root/$1" ] && return
  echo "installing a base of $1 into $root/$1"
  rm -rf "$root/new"
  mmdebstrap --variant=minbase --include="$2" --aptopt="$root/apt.conf" "$1" "$root/new" "$3" \
    >"$root/install.log" 2>&1 || { tail -5 "$root/install.log" >&2; exit 1; }
  # certificates for package indexes, if this machine has its own
  cp -L /etc/ssl/certs/ca-certificates.crt "$root/new/etc/ssl/certs/ca-certificates.crt"
  rm -rf "$root"/new/dev/* "$root"/new/var/cache/apt/archives/*.deb
  # the base itself has the keys that later packages are checked with
  sed -i 's/\[trusted=yes\] //' "$root"/new/etc/apt/sources.list 2>/dev/null || true
  mv "$root/new" "$root/$1"
}

make_base bookworm ca-certificates /etc/apt/sources.list.d/debian.sources
if [ -n "${UBUNTU_ARCHIVE:-}" ]; then
  # Debian has no keys of Ubuntu: the packages of the base are not checked
  make_base noble apt,ca-certificates,ubuntu-keyring,passwd "deb [trusted=yes] $UBUNTU_ARCHIVE noble main universe"
fi
