# What both scripts that make an environment of other packages do: sourced, with DIR as its argument.
#
# Sets `folder`, DIR as an absolute path, `python`, that of DIR/.venv, and `log`; gives `fail`, `first_python` and `pip`.

fail() {
  echo "environment.sh: $*" >&2
  exit 1
}

[ $# -eq 1 ] || fail "usage: environment.sh DIR"
mkdir -p "$1" || fail "cannot make $1"
folder=$(cd "$1" && pwd)
python=$folder/.venv/bin/python
log=$folder/install.log

first_python() {  # first_python NAME...: makes DIR/.venv with the first that can, unless it is there
  [ -x "$python" ] && return
  local name
  for name in "$@"; do
    if "$name" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      "$name" -m venv --clear "$folder/.venv"
      return
    fi
  done
  fail "none of $* makes environments here (Debian: apt-get install python3 python3-venv)"
}

pip() {
  "$python" -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 \
    || { tail -5 "$log" >&2; fail "pip failed, see $log"; }
}
