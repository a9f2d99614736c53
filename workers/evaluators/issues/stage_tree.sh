# Makes the tree where the image does not have it as the policy is to find it: of a bundle, with a bug put in.
set -e
if [ -f "$STAGED/tree.bundle" ]; then
  git init -q .
  git fetch -q "$STAGED/tree.bundle" '+refs/*:refs/bundle/*' 2>/dev/null
  git checkout -q -f -B main "$BASE"
fi
git rev-parse -q --verify HEAD >/dev/null || { echo 'the tree has no git repository with a commit' >&2; exit 1; }
if [ -s "$STAGED/bug.patch" ]; then
  git apply --whitespace=nowarn "$STAGED/bug.patch"
  # its history has the tree without the bug
  rm -rf .git
fi
rm -rf "$STAGED"
