#!/bin/bash
# Nodes of a farm as a Slurm job: `sbatch --nodes=4 --time=8:00:00 examples/slurm.sh`; what follows are options of
# `farm node`. Before that, once: a PostgreSQL and a Redis that all nodes reach, their addresses in FARM_STORE_URL and
# FARM_BROKER_URL, and `farm migrate`.
#SBATCH --job-name=farm
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=farm-%j.log

# A minute before the time limit Slurm sends SIGTERM to the step, not to this shell: so no `B:` before TERM. The nodes
# then begin nothing more, run on for their grace (15 s; scancel kills after 30), hand the rest back, and the job is
# COMPLETED. `exec`, as a shell that stayed would die of the SIGTERM of scancel and take the job down with it. A job that
# has ended is not started again: submit several, or `sbatch --array=1-8%4` for four at a time.
: "${FARM_STORE_URL:?set it to the address of the PostgreSQL, then sbatch again}"
: "${FARM_BROKER_URL:?set it to the address of the Redis, then sbatch again}"
exec srun --kill-on-bad-exit=0 farm node "$@"
