#!/usr/bin/env bash
# A base tree of Debian for the tests of installers: environment.sh DIR makes DIR/bookworm, unless it is there. It needs
# mmdebstrap, and Debian's packages as this machine reaches them.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: environment.sh DIR" >&2; exit 1; }
command -v mmdebstrap >/dev/null || { echo "there is no mmdebstrap: apt-get install mmdebstrap" >&2; exit 1; }
mkdir -p "$1"
root=$(cd "$1" && pwd)
[ -d "$root/bookworm" ] && exit 0

echo "installing a base of Debian into $root/bookworm"
chmod 755 "$root"
rm -rf "$root/new"
apt-config dump | grep '^Acquire::Check' >"$root/apt.conf" || true
mmdebstrap --variant=minbase --include=ca-certificates --aptopt="$root/apt.conf" bookworm "$root/new" \
  /etc/apt/sources.list.d/debian.sources >"$root/install.log" 2>&1 || { tail -5 "$root/install.log" >&2; exit 1; }
# certificates of the way to package indexes, if this machine has its own
cp -L /etc/ssl/certs/ca-certificates.crt "$root/new/etc/ssl/certs/ca-certificates.crt"
rm -rf "$root"/new/dev/* "$root"/new/var/cache/apt/archives/*.deb
mv "$root/new" "$root/bookworm"
