#!/bin/bash
# Runs the tests of a terminal-bench task and reads their results as its parser does: the summary that `pytest -rA`
# prints, or the block that the SWE-bench adapter prints. Without either there is no result.
own() {  # own COPY PLACE: a place that a policy may not change has the task's own files again
  if [ -d "/tests/$1" ] && [ -d "$2" ] && [ ! -L "$2" ]; then
    (shopt -s dotglob nullglob; rm -rf "$2"/*)
    cp -a "/tests/$1/." "$2"
  else
    rm -rf "$2"
    mkdir -p "${2%/*}/"
    cp -a "/tests/$1" "$2"
  fi
}
parser=pytest
output=/logs/verifier/terminal.txt
bash /tests/run-tests.sh > "$output" 2>&1 < /dev/null
if [ "$parser" = swebench ]; then
  cat "$output"
  text=$(tr -d '\0' < "$output")
  [[ $text == *"SWEBench results starts here"* && $text == *"SWEBench results ends here"* ]] || exit 1
  block=${text#*SWEBench results starts here}
  block=${block%SWEBench results ends here*}
  read -r -d '' word rest <<< "${block//[$'\r\v\f\034\035\036\037']/ }"
  [ "$word" = PASSED ] && [ -z "$rest" ] && reward=1 || reward=0
  echo "$reward" > /logs/verifier/reward.txt
  exit
fi
cat "$output"
tr '\r\v\f\034\035\036' '\n' < "$output" > "$output.lines"
# of a test that is named twice the last result counts
declare -A results
summary=0 title='=+[[:space:]]*short test summary info[[:space:]]*=+'
shopt -s extglob nocasematch
while IFS= read -r line || [ -n "$line" ]; do
  if [ "$summary" = 0 ]; then
    [[ $line == *"short test summary info"* && $line =~ $title ]] || continue
    line=${line#*"${BASH_REMATCH[0]}"}
    summary=1
    shopt -u nocasematch
  fi
  [[ $line != FAILED* ]] || line=${line% - *}
  read -r word rest <<< "$line"
  name=${rest#*::}
  [ -n "$name" ] || continue
  word=${word##+(:)}
  case ${word%%+(:)} in
    PASSED | SKIPPED | XFAIL) results["of $name"]=1 ;;
    FAILED | ERROR | XPASS) results["of $name"]=0 ;;
  esac
done < "$output.lines"
rm -f "$output.lines"
[ "$summary" = 1 ] || exit 1
[ "${#results[@]}" -gt 0 ] && [[ " ${results[*]} " != *" 0 "* ]] && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
