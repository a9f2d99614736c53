#!/usr/bin/env bash
# RabbitMQ and its Erlang under one prefix, without root, for machines that have none: rabbitmq.sh PREFIX
#
# The packages of this machine's own distribution, unpacked instead of installed: an installed one would also be started
# as a service. Erlang's start script has its place written into it, and is told the new one.
set -euo pipefail

fail() {
  echo "rabbitmq.sh: $*" >&2
  exit 1
}

[ $# -eq 1 ] || fail "usage: rabbitmq.sh PREFIX"
mkdir -p "$1" || fail "cannot make $1"
prefix=$(cd "$1" && pwd)

works() { # prints the version of Erlang's library; the place is in the script, so a moved prefix does not
  [ -x "$prefix/rabbitmq/sbin/rabbitmq-server" ] &&
    "$prefix/usr/bin/erl" -noshell -eval 'io:format("~s~n", [erlang:system_info(otp_release)]), halt().' 2>/dev/null
}

works && exit 0

for program in apt-get dpkg; do
  command -v "$program" >/dev/null || fail "no $program here: install your distribution's rabbitmq-server"
done

erlang=(base crypto asn1 eldap ftp inets mnesia os-mon parsetools public-key runtime-tools snmp ssl syntax-tools tftp tools xmerl)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,packages}
options=(-qq -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User= -o Debug::NoLocking=1)
apt-get "${options[@]}" update >"$work/log" 2>&1 || fail "no package list: $(tail -1 "$work/log")"
(cd "$work/packages" && apt-get "${options[@]}" download rabbitmq-server "${erlang[@]/#/erlang-}") >"$work/log" 2>&1 ||
  fail "the packages cannot be fetched: $(tail -1 "$work/log")"

for package in "$work"/packages/*.deb; do
  dpkg -x "$package" "$prefix" || fail "$(basename "$package") cannot be unpacked in $prefix"
done
sed -i "s#=/usr/lib/erlang\$#=$prefix/usr/lib/erlang#" "$prefix/usr/lib/erlang/bin/erl"
server=("$prefix"/usr/lib/rabbitmq/lib/rabbitmq_server-*)
ln -sfn "${server[0]}" "$prefix/rabbitmq"

works || fail "what was unpacked in $prefix does not run"
