#!/usr/bin/env bash
# process_group.sh COMMAND...: runs a command that has processes of its own, as the first of a process group. With the
# command, or on SIGTERM, all of the group ends: a vLLM whose server is killed leaves its engine running.
trap : TERM
"$@" &
command=$!
wait $command
trap '' TERM
kill -TERM 0
(sleep 15; kill -KILL 0) &
wait $command
kill -KILL 0
