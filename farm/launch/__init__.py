"""A farm on a cluster: its head, the way of nodes to it, and its nodes as jobs of Slurm or actors of Ray."""
