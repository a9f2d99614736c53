# Prints the names in the folder $0, $1 levels deep, each ended by a zero byte, without hidden files.
folder="${0%/}/" depth=$1
if type -P find >/dev/null; then exec find "$folder" -mindepth 1 -maxdepth "$depth" -name '.*' -prune -o -print0; fi
shopt -s nullglob
for name in "$folder"*; do
    printf '%s\0' "$name"
    if ((depth > 1)); then for below in "$name"/*; do printf '%s\0' "$below"; done; fi
done
