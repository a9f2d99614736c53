"""A farm on a cluster: its head, the nodes' connection to it, and nodes as Slurm jobs or Ray actors."""
