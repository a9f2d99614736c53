#!/usr/bin/env bash
# process_group.sh COMMAND...: runs a command with child processes as the leader of a process group. The whole group ends
# with the command, or on SIGTERM: a vLLM whose server is killed would leave its engine running.
trap : TERM
"$@" &
command=$!
wait $command
trap '' TERM
kill -TERM 0
(sleep 15; kill -KILL 0) &
wait $command
kill -KILL 0
