# Lists what a patch changed, of itself and as git sees it: a patch may have git ignore what it adds.
set -e
mkdir -p "$FOLDER"
git diff --name-only -z --no-renames --no-ext-diff $BASELINE > "$FOLDER/changed"
[ ! -s "$FOLDER/model.patch" ] || git apply -z --numstat "$FOLDER/model.patch" > "$FOLDER/changed.numstat"
