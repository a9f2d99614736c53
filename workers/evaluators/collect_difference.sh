# Prints the diff to the marked tree, at most $MAX_BYTES of it.
#
# It runs in a folder that the policy may have filled with anything, so the rule is: nothing that the policy wrote is
# used as configuration, as the name of a file to write, or without a bound. The repository, index and objects are new
# ones in a folder of a random name, with no configuration, hooks, filters, attributes or exclusions but those in the
# tree itself; of the policy's repository only the id of the mark and the objects are read. Files beyond a size are
# refused before they are read.
set -eu
[ -d .git ] || { echo 'there is no repository' >&2; exit 1; }
id=
if [ -f .git/$BASELINE ]; then read -r id < .git/$BASELINE; fi
if [ -z "$id" ] && [ -f .git/packed-refs ]; then
  while read -r packed name; do [ "$name" != $BASELINE ] || id=$packed; done < .git/packed-refs
fi
case $id in ''|*[!0-9a-f]*) echo 'the mark of the tree as given is gone' >&2; exit 1;; esac
GIT_DIR=$(mktemp -d)
export GIT_DIR GIT_WORK_TREE="$PWD" GIT_ALTERNATE_OBJECT_DIRECTORIES="$PWD/.git/objects"
trap 'rm -rf -- "$GIT_DIR"' EXIT
git init -q --template=
git read-tree "$id"
while IFS= read -r -d '' big; do
  big=${big#./}
  given=$(git ls-tree -l "$id" -- "$big" | { read -r _ _ _ size _ || :; echo "${size:-}"; })
  [ "$given" != "$(stat -c %s -- "$big")" ] || continue
  if [ -z "$given" ] && git check-ignore -q -- "$big"; then continue; fi
  echo "the file $big is too large: at most $MAX_FILE_MB MB" >&2; exit 1
done < <(find . -xdev -path ./.git -prune -o -type f -size +${MAX_FILE_MB}M -print0)
# Bytecode is not part of a change: the evaluator compiles the sources itself. 1: some files were unreadable; they count
# as unchanged.
git add -A --ignore-errors -- . ':(exclude,glob)**/__pycache__/**' || [ $? -eq 1 ]
set +e
git diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames "$id" | head -c "$MAX_BYTES"
case ${PIPESTATUS[0]} in 0|141) exit 0;; *) exit 1;; esac
