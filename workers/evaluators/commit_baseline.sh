# Marks the current tree, in a new repository if there is none. Uncommitted changes are part of it.
set -e
if ! git rev-parse -q --verify HEAD >/dev/null 2>&1; then
  git init -q .
  git add -A -f
  git commit -q --allow-empty -m baseline
fi
mark=HEAD
if [ -n "$(git status --porcelain | head -c 1)" ]; then
  index=$(mktemp -u)
  # Tracked files that the tree ignores come from HEAD.
  GIT_INDEX_FILE=$index git read-tree HEAD
  GIT_INDEX_FILE=$index git add -A
  mark=$(git commit-tree -m baseline -p HEAD "$(GIT_INDEX_FILE=$index git write-tree)")
  rm -f "$index"
fi
git update-ref $BASELINE "$mark"
