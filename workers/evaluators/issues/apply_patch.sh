# Applies the policy's patch as swebench does: tries one command after another, each on the original tree.
tries=("git apply --verbose" "git apply --verbose --3way" "git apply --verbose --reject"
  "patch --batch --forward --fuzz=5 -p1 -i")
for index in "${!tries[@]}"; do
  if [ "$index" != 0 ]; then git checkout -q "$BASELINE" -- . ; git reset -q; git clean -qfd; fi
  if ${tries[$index]} "$FOLDER/model.patch" > "$FOLDER/applied.log" 2>&1; then exit 0; fi
done
# The commands may leave it applied though each has failed.
if git apply --check --reverse "$FOLDER/model.patch" 2>/dev/null; then exit 0; fi
tail -c 2000 "$FOLDER/applied.log" >&2
exit 1
