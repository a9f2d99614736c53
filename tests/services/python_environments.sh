# What scripts do that make an environment for each of several packages: sourced, with DIR as its argument.
#
# Sets `root`, DIR as an absolute path, and gives `environment` and `node_environment`.

[ $# -eq 1 ] || { echo "usage: environment.sh DIR" >&2; exit 1; }
mkdir -p "$1"
root=$(cd "$1" && pwd)

environment() {  # environment NAME PYTHON WHAT...: DIR/NAME/.venv with these packages; none where that Python is missing
  local name=$1 python=$2 folder=$root/$1
  shift 2
  local stamp
  stamp=$folder/.venv/installed-$(printf '%s ' "$@" | sha256sum | cut -c1-16)
  [ -e "$stamp" ] && return
  # pyenv keeps its versions in one folder, without a common name
  local exact
  exact=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"${python#python}".*/bin/python 2>/dev/null | tail -1 || true)
  if ! "$python" -c '' 2>/dev/null; then
    [ -n "$exact" ] || { echo "there is no $python, so the tests of $name are left out"; return; }
    python=$exact
  fi
  echo "installing $name into $folder"
  mkdir -p "$folder"
  "$python" -m venv --clear "$folder/.venv"
  "$folder/.venv/bin/python" -m pip --disable-pip-version-check --no-input install "$@" >"$folder/install.log" 2>&1 \
    || { tail -5 "$folder/install.log" >&2; exit 1; }
  touch "$stamp"
}

node_environment() {  # node_environment NAME WHAT...: DIR/NAME/node_modules with these packages; none where there is no npm
  local name=$1 folder=$root/$1
  shift
  local stamp
  stamp=$folder/installed-$(printf '%s ' "$@" | sha256sum | cut -c1-16)
  [ -e "$stamp" ] && return
  command -v npm >/dev/null || { echo "there is no npm, so the tests of $name are left out"; return; }
  echo "installing $name into $folder"
  rm -rf "$folder"
  mkdir -p "$folder"
  npm install --silent --no-fund --no-audit --ignore-scripts --prefix "$folder" "$@" >"$folder/install.log" 2>&1 \
    || { tail -5 "$folder/install.log" >&2; exit 1; }
  touch "$stamp"
}
