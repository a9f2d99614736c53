#!/bin/bash
# Runs the tests of a terminal-bench task and reads their results as its parser does: the summary that `pytest -rA`
# prints, or the block that the SWE-bench adapter prints. Without either there is no result.
parser=pytest
output=/logs/verifier/terminal.txt
bash /tests/run-tests.sh > "$output" 2>&1 < /dev/null
if [ "$parser" = swebench ]; then
  cat "$output"
  text=$(tr -d '\0' < "$output")
  block=${text#*SWEBench results starts here}
  [ "$block" != "$text" ] || exit 1
  text=$block
  block=${text%SWEBench results ends here*}
  [ "$block" != "$text" ] || exit 1
  read -r -d '' word rest <<< "$block"
  [ "$word" = PASSED ] && [ -z "$rest" ] && reward=1 || reward=0
  echo "$reward" > /logs/verifier/reward.txt
  exit
fi
summary=0 passed=0 failed=0
while IFS= read -r line || [ -n "$line" ]; do
  printf '%s\n' "$line"
  case $line in
    *"short test summary info"*) summary=1 ;;
    "PASSED "*) passed=$((passed + summary)) ;;
    "FAILED "* | "ERROR "*) failed=$((failed + summary)) ;;
  esac
done < "$output"
[ "$summary" = 1 ] || exit 1
[ "$passed" -gt 0 ] && [ "$failed" = 0 ] && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
