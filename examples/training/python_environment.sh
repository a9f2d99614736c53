# Common functions of the scripts that make environments of other packages: sourced, with DIR as its argument.
#
# Sets `folder`, DIR as an absolute path, `python`, that of DIR/.venv, and `log`; defines `fail`, `is_whole`, `begin`,
# `install`, `install_all` and `finish`. uv installs where it is on PATH, pip where it is not or uv fails.
#
# A script may be stopped at any moment, also by kill -9, and resumes at its next call: an environment is complete when
# `finish` has written its mark, and partially installed packages are reinstalled. Of two scripts for one DIR the second
# waits. A process that kill -9 left behind counts as the first.

sources=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
child=
AT_A_TIME=10

fail() {
  echo "environment.sh: $*" >&2
  exit 1
}

stopped() {
  [ -z "$child" ] || { kill -- "-$child" && wait "$child"; } 2>/dev/null || true
  echo "environment.sh: stopped; the next call goes on from here" >&2
  exit 130
}
trap stopped INT TERM HUP

run() {  # in the background and a group of its own, so that a signal stops all of it at once
  setsid "$@" >>"$log" 2>&1 &
  child=$!
  local rc=0
  wait "$child" || rc=$?
  child=
  return $rc
}

[ $# -eq 1 ] || fail "usage: environment.sh DIR"
mkdir -p "$1" || fail "cannot make $1"
folder=$(cd "$1" && pwd)
python=$folder/.venv/bin/python
log=$folder/install.log
uv=$(command -v uv || true)

exec 9>"$folder/.lock"
flock -n 9 || { echo "environment.sh: another one works on $folder: waiting for its end"; flock 9; }

is_whole() {  # is_whole SUM: an environment of this content is there
  [ -e "$folder/.venv/installed-$1" ]
}

begin() {  # begin WHAT PYTHON...: makes DIR/.venv with the first Python that can, or goes on with a half-made one
  echo "environment.sh: installing $1 into $folder, by ${uv:-pip}; what that says is in $log"
  shift
  : >"$log"
  if [ -n "$(ls "$folder"/.venv/installed-* "$folder"/.venv/made 2>/dev/null)" ]; then
    touch "$folder/.venv/made"
    rm -f "$folder"/.venv/installed-*
    echo "  going on with $folder/.venv"
    leave_whole_ones
    return
  fi
  local name
  for name in "$@"; do
    "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue
    if [ -z "$uv" ] || ! run "$uv" venv --clear --python "$name" "$folder/.venv"; then
      run "$name" -m venv --clear "$folder/.venv" || continue
    fi
    touch "$folder/.venv/made"
    return
  done
  fail "none of $* makes environments here (Debian: apt-get install python3 python3-venv)"
}

leave_whole_ones() {  # what was half installed is installed no longer
  "$python" "$sources/whole_packages.py" --repair || fail "cannot read $folder/.venv: remove it"
}

install() {  # install ARGUMENT...: of `pip install`, but for what uv lacks
  if [ -n "$uv" ] && [[ " $* " != *" --ignore-requires-python "* ]]; then
    # pip's extra index, and like pip the best version of all indexes
    run env UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" \
      UV_EXTRA_INDEX_URL="${UV_EXTRA_INDEX_URL:-${PIP_EXTRA_INDEX_URL:-}}" \
      "$uv" pip install --python "$python" "$@" && return
    tail -3 "$log" >&2
    echo "  uv failed, so pip goes on" >&2
    uv=
    leave_whole_ones
  fi
  [ -e "$folder/.venv/bin/pip" ] || run "$python" -m ensurepip || fail "there is no pip in $folder/.venv, see $log"
  run "$python" -m pip --disable-pip-version-check --no-input install "$@" \
    || { tail -5 "$log" >&2; fail "pip failed, see $log"; }
}

install_all() {  # install_all FILE: its packages, as they are listed, a few at a time, as what is installed stays
  local wanted=() some n_done=0 began=$SECONDS
  mapfile -t wanted < <(sed 's/ *#.*//; /^$/d' "$1")
  while [ "$n_done" -lt ${#wanted[@]} ]; do
    some=("${wanted[@]:n_done:AT_A_TIME}")
    echo "  $n_done of ${#wanted[@]} packages after $((SECONDS - began)) s; next ${some[0]%%=*} to ${some[-1]%%=*}"
    install --no-deps "${some[@]}"
    n_done=$((n_done + ${#some[@]}))
  done
  echo "  $n_done of ${#wanted[@]} packages after $((SECONDS - began)) s"
}

finish() {  # finish SUM: the environment is whole, with this content
  "$python" "$sources/whole_packages.py" >>"$log" || fail "some packages are not whole, see $log: call it again"
  touch "$folder/.venv/installed-$1"
}
