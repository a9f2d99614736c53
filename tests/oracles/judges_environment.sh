#!/usr/bin/env bash
# The scorers of programs of well-known forms: judges_environment.sh DIR makes DIR/.venv, 250 MB, with those that are on
# the package index, and fetches the others from GitHub at the commits below into DIR. If GitHub is unreachable, a copy
# in the same place is used; without one their rules are skipped. They are never dependencies of the farm.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=examples/training/python_environment.sh
. "$here/../../examples/training/python_environment.sh"
# shellcheck source=tests/services/github_sources.sh
. "$here/../services/github_sources.sh"

WANTED=(numpy==2.3.5 pandas==3.1.1 python-dateutil==4.0.0 pytz==2026.6 six==1.17.0 tzdata==2026.6 psutil==7.2.2
  tqdm==4.70.1 tree-sitter==0.26.1 tree-sitter-python==0.25.0
  verl==0.9.1 skyrl-gym==0.4.0 nemo-gym==0.7.0)

sum=$(printf '%s ' "${WANTED[@]}" | sha256sum | cut -c1-16)
if ! is_whole "$sum"; then
  begin "the scorers of programs (250 MB)" python3.11
  # only their scoring modules are imported, which need no more packages
  install --no-deps --ignore-requires-python "${WANTED[@]}"
  finish "$sum"
fi
source_of LiveCodeBench/LiveCodeBench 28fef95ea8c9f7a547c8329f2cd3d32b92c1fa24
source_of hendrycks/apps 362aedc3c71cd7d9bd2fc96a6c80e11dbc38c7a5
source_of FlagOpen/TACO 245eba3beb2d23a07082307de303de2589e4321a
source_of evalplus/evalplus 26d6d00bb1fd0fa37f39c99d5290da67891d1c5e
source_of google-deepmind/code_contests fa7a4f8139aab08362503f3344778eb86901709a

judge=$folder/code_contests_judge
if ! [ -e "$judge" ] && [ -e "$folder/code_contests" ]; then
  if command -v g++ >/dev/null; then
    for function in 'std::vector<std::string> SplitAndLowercase' 'bool ValuesMatch' 'bool OutputsMatch'; do
      sed -n "/^$function(/,/^}/p" "$folder/code_contests/execution/tester_sandboxer.cc"
    done >"$folder/outputs_match.inc"
    g++ -std=c++20 -O1 -DOUTPUTS_MATCH="\"$folder/outputs_match.inc\"" -o "$judge" "$here/programs/code_contests_judge.cc"
  else
    echo "there is no g++, so CodeContests' comparison is left out"
  fi
fi
