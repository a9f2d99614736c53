# Creates the tree for the policy if the image does not have it: from a bundle, with the bug added.
set -e
if [ -f "$STAGED/tree.bundle" ]; then
  git init -q .
  git fetch -q "$STAGED/tree.bundle" '+refs/*:refs/bundle/*' 2>/dev/null
  git checkout -q -f -B main "$BASE"
fi
git rev-parse -q --verify HEAD >/dev/null || { echo 'the tree has no git repository with a commit' >&2; exit 1; }
if [ -s "$STAGED/bug.patch" ]; then
  git apply --whitespace=nowarn "$STAGED/bug.patch"
  # Its history contains the tree without the bug.
  rm -rf .git
fi
rm -rf "$STAGED"
