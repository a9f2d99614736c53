# Lists a patch's changes, by its own paths and by git: a patch may make git ignore files that it adds.
set -e
mkdir -p "$FOLDER"
git diff --name-only -z --no-renames --no-ext-diff $BASELINE > "$FOLDER/changed"
[ ! -s "$FOLDER/model.patch" ] || git apply -z --numstat "$FOLDER/model.patch" > "$FOLDER/changed.numstat"
