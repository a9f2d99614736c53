#!/usr/bin/env bash
# RabbitMQ and its Erlang under one prefix, without root, for machines that have none: rabbitmq.sh PREFIX
#
# Erlang's start script contains its path, which is replaced.
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

erlang=(base crypto asn1 eldap ftp inets mnesia os-mon parsetools public-key runtime-tools snmp ssl syntax-tools tftp tools xmerl)
bash "$(dirname "${BASH_SOURCE[0]}")/debian_packages.sh" "$prefix" rabbitmq-server "${erlang[@]/#/erlang-}"
sed -i "s#=/usr/lib/erlang\$#=$prefix/usr/lib/erlang#" "$prefix/usr/lib/erlang/bin/erl"
server=("$prefix"/usr/lib/rabbitmq/lib/rabbitmq_server-*)
ln -sfn "${server[0]}" "$prefix/rabbitmq"

works || fail "what was unpacked in $prefix does not run"
