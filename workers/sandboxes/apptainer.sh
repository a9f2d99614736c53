#!/usr/bin/env bash
# Install Apptainer below a prefix, without root, for machines whose distribution has no package: apptainer.sh PREFIX
#
# The package is only in Debian's development suite, built for a newer C library than that of a stable system. So it is
# unpacked, not installed, together with that library, and its programs are patched to use it: with the interpreter, and
# a forced RPATH, because a RUNPATH does not apply to libraries of libraries. Apptainer finds its files relative to
# itself: the program below usr/, its starter below usr/lib/.
set -euo pipefail
# files that root unpacks are run by another user
umask 022

fail() {
  echo "apptainer.sh: $*" >&2
  exit 1
}

[ $# -eq 1 ] || fail "usage: apptainer.sh PREFIX"
mkdir -p "$1" || fail "cannot make $1"
prefix=$(cd "$1" && pwd)

works() { # prints the version
  # both print it on standard output; unsquashfs exits with 1 nevertheless
  { "$prefix/usr/bin/unsquashfs" -version || true; } 2>/dev/null | grep -q version && "$prefix/usr/bin/apptainer" --version 2>/dev/null
}

works && exit 0

[ "$(uname -m)" = x86_64 ] || fail "only for x86_64, this is $(uname -m): install your distribution's apptainer"
for program in apt-get dpkg; do
  command -v "$program" >/dev/null || fail "no $program here, it is only for Debian and Ubuntu: install your distribution's apptainer"
done
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keyring" ] || fail "no $keyring: install the package debian-archive-keyring"

# use the mirror that this machine is configured for, and nothing else
mirror=$(sed -n 's/^URIs: *\([^ ]*debian\/\?\) *$/\1/p' /etc/apt/sources.list.d/*.sources 2>/dev/null | head -1)
[ -n "$mirror" ] || mirror=$(sed -n 's/^deb \(\[[^]]*\] \)\?\([^ ]*debian\/\?\) .*/\2/p' /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | head -1)
[ -n "$mirror" ] || fail "apt has no Debian mirror: name one in /etc/apt/sources.list"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,packages}

fetch() { # suite package...
  local suite=$1
  shift
  echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/$suite.list"
  local options=(
    -qq -o Dir::Etc::SourceList="$work/$suite.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User= -o Debug::NoLocking=1
  )
  apt-get "${options[@]}" update >"$work/log" 2>&1 || fail "no package list of $suite: $(tail -1 "$work/log")"
  (cd "$work/packages" && apt-get "${options[@]}" download "$@") >"$work/log" 2>&1 ||
    fail "packages of $suite cannot be fetched: $(tail -1 "$work/log")"
}

fetch sid apptainer
fetch trixie libc6 libseccomp2 libsqlite3-0
fetch bookworm squashfuse fuse-overlayfs squashfs-tools libsquashfuse0 libfuse3-3 liblzo2-2 patchelf

for package in "$work"/packages/*.deb; do
  dpkg -x "$package" "$prefix" || fail "$(basename "$package") cannot be unpacked in $prefix"
done

libraries=$prefix/usr/lib/x86_64-linux-gnu
programs=("$libraries/apptainer/bin/starter")
for name in apptainer fuse-overlayfs mksquashfs squashfuse squashfuse_ll unsquashfs; do
  programs+=("$prefix/usr/bin/$name")
done
for program in "${programs[@]}"; do
  "$prefix/usr/bin/patchelf" --set-interpreter "$libraries/ld-linux-x86-64.so.2" \
    --force-rpath --set-rpath "$libraries:$prefix/lib/x86_64-linux-gnu" "$program" || fail "$program cannot be adapted"
done
for beside in usr usr/lib; do
  ln -sfn "$prefix/etc" "$prefix/$beside/etc"
  mkdir -p "$prefix/$beside/var/lib/apptainer/mnt/session"
done
mkdir -p "$prefix/var/lib/apptainer/mnt/session"

works || fail "what was installed in $prefix does not run"
