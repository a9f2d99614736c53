# Removes everything from a repository except the history of the current commit: remotes, later commits, their objects.
set -e
head=$(git rev-parse HEAD)
branch=$(git symbolic-ref -q HEAD || :)
for remote in $(git remote); do git remote remove "$remote"; done
git for-each-ref --format='%(refname)' | while IFS= read -r ref; do
  case $ref in "$branch"|"$BASELINE") continue;; esac
  if [ "${ref#refs/tags/}" = "$ref" ] || ! git merge-base --is-ancestor "$ref^{commit}" "$head" 2>/dev/null; then
    git update-ref -d "$ref"
  fi
done
rm -rf .git/logs .git/refs/stash .git/worktrees
rm -f .git/FETCH_HEAD .git/ORIG_HEAD .git/MERGE_HEAD .git/CHERRY_PICK_HEAD .git/AUTO_MERGE .git/objects/pack/*.keep
git repack -q -a -d
rm -f .git/objects/info/alternates
git prune --expire=now
git prune-packed -q
