# Marks the tree as it is now, in a repository of its own if there is none. Changes that are not committed are part of it.
set -e
if ! git rev-parse -q --verify HEAD >/dev/null 2>&1; then
  git init -q .
  git add -A -f
  git commit -q --allow-empty -m baseline
fi
mark=HEAD
if [ -n "$(git status --porcelain | head -c 1)" ]; then
  index=$(mktemp -u)
  # what the tree ignores, but has, is in HEAD
  GIT_INDEX_FILE=$index git read-tree HEAD
  GIT_INDEX_FILE=$index git add -A
  mark=$(git commit-tree -m baseline -p HEAD "$(GIT_INDEX_FILE=$index git write-tree)")
  rm -f "$index"
fi
git update-ref $BASELINE "$mark"
