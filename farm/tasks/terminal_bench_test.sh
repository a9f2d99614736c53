#!/bin/bash
# Runs the tests of a terminal-bench task and reads the summary that `pytest -rA` prints. No summary is no result.
output=/logs/verifier/terminal.txt
bash /tests/run-tests.sh > "$output" 2>&1 < /dev/null
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
